-- commit: written -> committed, and leased -> ready with the last k (worker). Several samples of one job at once.
-- KEYS: group:JOB, meta:JOB, ready, inflight, samples
-- ARGV: prefix, job, token, then per sample: k, oldest version (-1: none), metadata record
-- Returns: {'ok' | 'ready' | 'lost', new commits, already committed by this token, committed by another lease}
-- Atomic because a sample must be committed at most once, whoever tries, however late (I2), and only by the
-- holder of the lease (I3). Saying it twice with the same token changes nothing.
local prefix, job, token = ARGV[1], ARGV[2], ARGV[3]
local g = redis.call('HMGET', KEYS[1], 'st', 'tok', 'n', 'o', 'ln', 'nb', 'cl', 'eid')
local holds = g[1] == 'leased' and g[2] == token
local new, again, taken = 0, 0, 0
if not holds then
  for i = 4, #ARGV, 3 do
    if redis.call('HGET', KEYS[1], 's:' .. ARGV[i]) == token then again = again + 1 end
  end
  if again * 3 == #ARGV - 3 then return {g[1] == 'ready' and 'ready' or 'ok', 0, again, 0} end
  count(prefix, 'refused')
  return {'lost', 0, again, 0}
end
local oldest = tonumber(g[4] or -1)
for i = 4, #ARGV, 3 do
  local k, o = ARGV[i], tonumber(ARGV[i + 1])
  if redis.call('HSETNX', KEYS[1], 's:' .. k, token) == 1 then
    redis.call('APPEND', KEYS[2], ARGV[i + 2])
    redis.call('DEL', prefix .. 'partial:' .. job .. '/' .. k)
    if o >= 0 and (oldest < 0 or o < oldest) then oldest = o end
    new = new + 1
  elseif redis.call('HGET', KEYS[1], 's:' .. k) == token then
    again = again + 1
  else
    taken = taken + 1
  end
end
local committed = redis.call('HINCRBY', KEYS[1], 'c', new)
redis.call('HSET', KEYS[1], 'o', oldest)
if new > 0 then count(prefix, 'committed', new) end
if taken > 0 then count(prefix, 'refused', taken) end
if committed < tonumber(g[3]) then return {'ok', new, again, taken} end
redis.call('HSET', KEYS[1], 'st', 'ready')
redis.call('HDEL', KEYS[1], 'tok', 'own', 'pf')
redis.call('XACK', lane_key(prefix, g[7]), GROUP, g[8])
redis.call('XDEL', lane_key(prefix, g[7]), g[8])
redis.call('ZREM', KEYS[4], job)
redis.call('ZADD', KEYS[3], count(prefix, 'completed'), job)
leave_cohort(prefix, job, g[5], g[6])
event(prefix, 'completed', job, g[5])
return {'ready', new, again, taken}
