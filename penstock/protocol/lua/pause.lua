-- pause: nothing more is leased from a lane, until it is opened again (operator). Jobs that are leased go on.
-- KEYS: paused, paused_by
-- ARGV: prefix, lane, record of who closed it and when ('' opens it)
-- Returns: 1, or 0 when it was so already (who closed it first stays)
-- Atomic because who looks why nothing is leased finds who closed it; in a full Redis too. Workers are woken, which
-- sleep while there is nothing to lease.
local paused_key, by_key = KEYS[1], KEYS[2]
local prefix, lane, record = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
if record == '' then
  redis.call('HDEL', by_key, lane)
  if redis.call('SREM', paused_key, lane) == 0 then return 0 end
  poke(prefix .. 'wake', redis.call('ZCARD', line_key_of(prefix, lane)))
  return 1
end
if redis.call('SADD', paused_key, lane) == 0 then return 0 end
redis.call('HSET', by_key, lane, record)
return 1
