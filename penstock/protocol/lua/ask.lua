-- ask: a trainer reports that it waits for batch n, so that it is cut then and not before (late, fresh).
-- KEYS: sub:NAME
-- ARGV: prefix, sub, n, owner, gen
-- Returns: 1, or 0 when the subscription is not the caller's
-- Atomic because an abandoned trainer must not make the buffer cut.
local sub_key = KEYS[1]
local prefix, sub, n, owner, gen = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]

freeing(prefix) -- a full Redis is emptied by trainers that continue
if not owns(sub_key, owner, gen) then return 0 end
-- other roles begin when the driver does, not before it has rewound (T13)
redis.call('HSET', sub_key, 'asker', owner)
if tonumber(redis.call('HGET', sub_key, 'ask') or 0) < n then
  redis.call('HSET', sub_key, 'ask', n)
  event(prefix, 'ask', '', sub)
end
return 1
