-- ask: a trainer says that it waits for batch n, so that it is cut then and not before (late, fresh).
-- KEYS: sub:NAME, samples
-- ARGV: prefix, sub, n, owner, gen
-- Returns: 1, or 0 when the subscription is not the caller's
-- Atomic because an abandoned trainer must not make the buffer cut.
local prefix, n = ARGV[1], tonumber(ARGV[3])
freeing(prefix) -- a trainer that goes on is what empties a full Redis
if not owns(KEYS[1], ARGV[4], ARGV[5]) then return 0 end
-- other roles begin when the driver does, not before it has rewound (T13)
redis.call('HSET', KEYS[1], 'asker', ARGV[4])
if tonumber(redis.call('HGET', KEYS[1], 'ask') or 0) < n then
  redis.call('HSET', KEYS[1], 'ask', n)
  event(prefix, 'ask', '', ARGV[2])
end
return 1
