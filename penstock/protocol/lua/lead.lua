-- lead: take or renew the leadership of the buffer.
-- KEYS: leader, epoch
-- ARGV: prefix, token, lease in ms
-- Returns: epoch, or 0 when another leads
-- Atomic because two buffers must not lead in one epoch.
freeing(ARGV[1])
local holder = redis.call('HMGET', KEYS[1], 'token', 'epoch')
if holder[1] and holder[1] ~= ARGV[2] then return 0 end
if holder[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  return tonumber(holder[2])
end
local epoch = redis.call('INCR', KEYS[2])
redis.call('HSET', KEYS[1], 'epoch', epoch, 'token', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return epoch
