-- record: take or renew the right to record the run's history (recorder). The first call enables the history.
-- KEYS: recorder, history
-- ARGV: prefix, token, lease in ms, most groups that wait to be recorded, how long in ms they wait for a recorder,
--       newest epoch of the files: after a failover Redis may not know it
-- Returns: epoch, or 0 when another records
-- Atomic because two recorders must not write in one epoch, and no group may wait for a recorder that never ran.
local recorder_key, history_key = KEYS[1], KEYS[2]
local prefix, token, lease_ms, backlog, patience_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local newest = tonumber(ARGV[6])

freeing(prefix)
local holder = redis.call('HMGET', recorder_key, 'token', 'epoch', 'lease')
if holder[1] and holder[1] ~= token then
  if holder[3] then cap_lease(recorder_key, holder[3]) end
  return 0
end
local epoch = tonumber(holder[2] or 0)
if epoch == 0 or epoch < newest then
  epoch = math.max(redis.call('HINCRBY', history_key, 'epoch', 1), newest + 1)
  redis.call('HSET', history_key, 'epoch', epoch)
end
redis.call('HSET', recorder_key, 'epoch', epoch, 'token', token, 'lease', lease_ms)
redis.call('PEXPIRE', recorder_key, lease_ms)
redis.call('HSET', history_key, 'backlog', backlog, 'patience', patience_ms, 'at', now_ms())
return epoch
