-- release: leased -> queued on lane resume, without a charge (worker that drains, or starts anew).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, then per sample that is not committed: k, what was drawn of it
-- Returns: 1, or 0 when the lease is lost
-- Atomic because the job must be in exactly one lane at every instant (I1).
local group_key = KEYS[1]
local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
local first_told = 4

freeing(prefix)
local g = redis.call('HMGET', group_key, 'st', 'tok', 'cl', 'eid', 'nb', 'ln')
if g[1] ~= 'leased' or g[2] ~= token then return 0 end
tell_all(prefix, group_key, g[6], ARGV, first_told)
local body = take_entry(prefix, g[3], g[4])
end_try(group_key, 'released')
leave_inflight(prefix, job)
put_entry(prefix, g[3] == 'suspect' and 'suspect' or 'resume', job, g[5], body)
count(prefix, 'released')
return 1
