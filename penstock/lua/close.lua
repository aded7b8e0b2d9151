-- close: leased -> ready with the samples that are committed, where a policy allows a short group (leader).
-- KEYS: leader, group:JOB, ready, inflight, samples
-- ARGV: prefix, epoch, token, job
-- Returns: number of samples of the short group; 0 when it has none or is not leased; -1: leadership lost
-- Atomic because a sample that is committed meanwhile is either in the group or refused.
local prefix, job = ARGV[1], ARGV[4]
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
local g = redis.call('HMGET', KEYS[2], 'st', 'c', 'cl', 'eid', 'ln', 'nb')
if g[1] ~= 'leased' or tonumber(g[2] or 0) == 0 then return 0 end
take_entry(prefix, g[3], g[4])
redis.call('HSET', KEYS[2], 'st', 'ready', 'n', g[2])
redis.call('HDEL', KEYS[2], 'tok', 'own', 'pf')
redis.call('ZREM', KEYS[4], job)
redis.call('ZADD', KEYS[3], count(prefix, 'completed'), job)
leave_cohort(prefix, job, g[5], g[6])
count(prefix, 'closed')
event(prefix, 'completed', job, g[5])
return tonumber(g[2])
