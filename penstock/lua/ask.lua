-- ask: a trainer says that it waits for batch n, so that it is cut then and not before (late, fresh).
-- KEYS: sub:NAME, samples
-- ARGV: sub, n, owner, gen
-- Returns: 1, or 0 when the subscription is not the caller's
-- Atomic because an abandoned trainer must not make the buffer cut.
if not owns(KEYS[1], ARGV[3], ARGV[4]) then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'ask') or 0) < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'ask', ARGV[2])
  redis.call('XADD', KEYS[2], '*', 'e', 'ask', 'j', '', 'l', ARGV[1])
end
return 1
