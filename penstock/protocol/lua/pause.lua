-- pause: nothing more is leased from a lane until it is resumed (operator). Leased jobs continue.
-- KEYS: paused, paused_by
-- ARGV: prefix, lane, record of who paused it and when ('' resumes it)
-- Returns: 1, or 0 when it was in that state already (the first record stays)
-- Atomic because the lane and the record of who paused it change together, in a full Redis too. Sleeping workers are
-- woken.
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
