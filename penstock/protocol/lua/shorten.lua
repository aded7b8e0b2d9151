-- shorten: leased, queued or delayed -> ready with the samples that are committed, where a policy allows a short group
-- (leader). A worker that holds the job sees its lease lost.
-- KEYS: leader, group:JOB, ready
-- ARGV: prefix, epoch, token, job, fewest samples
-- Returns: number of samples of the short group; 0 when it has too few or is not begun; -1: leadership lost
-- Atomic because a sample that is committed meanwhile is either in the group or refused.
local leader_key, group_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, epoch, token, job, fewest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local g = redis.call('HMGET', group_key, 'c', 'n')
local have, wanted = tonumber(g[1] or 0), tonumber(g[2])
if have < math.max(1, fewest) then return 0 end
local lane = withdraw(prefix, job, 'shortened')
if not lane then return 0 end
forgo(prefix, group_key, lane, 'short_group')
redis.call('HSET', group_key, 'st', 'ready', 'n', have, 'w', wanted, 't1', now_ms())
redis.call('HDEL', group_key, 'pf')
redis.call('ZADD', ready_key, count(prefix, 'completed'), job)
for k = 0, wanted - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
count(prefix, 'shortened')
count(prefix, 'missing', wanted - have)
event(prefix, 'ready', job, lane)
return have
