-- shorten: leased, queued or delayed -> ready with the samples that are committed, where a policy allows a short group
-- (leader). A worker that holds the job sees its lease lost.
-- KEYS: leader, group:JOB, ready, inflight, delayed, bodies
-- ARGV: prefix, epoch, token, job, fewest samples
-- Returns: number of samples of the short group; 0 when it has too few or is not begun; -1: leadership lost
-- Atomic because a sample that is committed meanwhile is either in the group or refused.
local leader_key, group_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local inflight_key, delayed_key, bodies_key = KEYS[4], KEYS[5], KEYS[6]
local prefix, epoch, token, job, fewest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local g = redis.call('HMGET', group_key, 'st', 'c', 'cl', 'eid', 'ln', 'nb', 'n')
local st, have = g[1], tonumber(g[2] or 0)
if have < math.max(1, fewest) then return 0 end
if st == 'leased' or st == 'queued' then
  take_entry(prefix, g[3], g[4])
elseif st == 'delayed' then
  redis.call('ZREM', delayed_key, job)
  redis.call('HDEL', bodies_key, job)
else
  return 0
end
redis.call('HSET', group_key, 'st', 'ready', 'n', have, 'w', g[7])
redis.call('HDEL', group_key, 'tok', 'own', 'pf')
redis.call('ZREM', inflight_key, job)
redis.call('ZADD', ready_key, count(prefix, 'completed'), job)
for k = 0, tonumber(g[7]) - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
leave_cohort(prefix, job, g[5], g[6])
count(prefix, 'shortened')
count(prefix, 'missing', tonumber(g[7]) - have)
event(prefix, 'ready', job, g[5])
return have
