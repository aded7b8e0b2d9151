-- shorten: leased, queued or delayed -> ready with the committed samples, if a policy allows a short group
-- (leader). If a group reward is still to come -> queued for that. A worker that holds the job loses its
-- lease.
-- KEYS: leader, group:JOB, ready
-- ARGV: prefix, epoch, token, job, fewest samples
-- Returns: number of samples of the short group; 0 when it has too few, or all, or is not begun; -1: leadership lost
-- Atomic because a sample that is committed meanwhile is either in the group or refused.
local leader_key, group_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, epoch, token, job, fewest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

freeing(prefix)
if not leads(leader_key, epoch, token) then return -1 end
local g = redis.call('HMGET', group_key, 'c', 'n', 'rw', 'cl', 'nb')
local have, wanted = tonumber(g[1] or 0), tonumber(g[2])
if have < math.max(1, fewest) or have == wanted then return 0 end
local lane, body = withdraw(prefix, job, 'shortened')
if not lane then return 0 end
forgo(prefix, group_key, lane, 'short_group')
redis.call('HSET', group_key, 'n', have, 'w', wanted)
redis.call('HDEL', group_key, 'pf')
for k = 0, wanted - 1 do redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k) end
count(prefix, 'shortened')
count(prefix, 'missing', wanted - have)
if g[3] == '1' then
  enter_again(prefix, job)
  put_entry(prefix, g[4] == 'suspect' and 'suspect' or 'resume', job, g[5], body)
  return have
end
redis.call('HSET', group_key, 'st', 'ready', 't1', now_ms())
redis.call('ZADD', ready_key, count(prefix, 'completed'), job)
event(prefix, 'ready', job, lane)
return have
