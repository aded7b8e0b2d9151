-- lead: take or renew the leadership of the buffer.
-- KEYS: leader, epoch
-- ARGV: prefix, token, lease in ms
-- Returns: epoch, or 0 when another leads
-- Atomic because two buffers must not lead in one epoch.
local leader_key, epoch_key = KEYS[1], KEYS[2]
local prefix, token, lease_ms = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
local holder = redis.call('HMGET', leader_key, 'token', 'epoch', 'lease')
if holder[1] and holder[1] ~= token then
  if holder[3] then cap_lease(leader_key, holder[3]) end
  return 0
end
if holder[1] then
  redis.call('PEXPIRE', leader_key, lease_ms)
  return tonumber(holder[2])
end
local epoch = redis.call('INCR', epoch_key)
redis.call('HSET', leader_key, 'epoch', epoch, 'token', token, 'lease', lease_ms)
redis.call('PEXPIRE', leader_key, lease_ms)
return epoch
