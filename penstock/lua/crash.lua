-- crash: leased -> queued on resume or suspect, or dead (worker whose engine died under the job).
-- KEYS: group:JOB
-- ARGV: prefix, job, token, worker, detail
-- Returns: 'resume' | 'suspect' | 'dead', or 'lost'
-- Atomic as release is; the charge and the move are one.
local prefix, job = ARGV[1], ARGV[2]
freeing(prefix)
local g = redis.call('HMGET', KEYS[1], 'st', 'tok', 'cl', 'eid')
if g[1] ~= 'leased' or g[2] ~= ARGV[3] then return 'lost' end
local body = take_entry(prefix, g[3], g[4])
return crashed(prefix, job, g[3], body, ARGV[5], ARGV[4])
