-- checkpointed: committed -> durable up to n; the trainer's own file is safe (leader rank).
-- KEYS: sub:NAME, samples
-- ARGV: prefix, owner, gen, n
-- Returns: 1, 0 when the subscription is not the caller's, -1 when n is not committed
-- Atomic because groups may be retired from this instant on.
freeing(ARGV[1])
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return 0 end
local s = redis.call('HMGET', KEYS[1], 'cursor', 'ckpt')
local n = tonumber(ARGV[4])
if n > tonumber(s[1] or 0) then return -1 end
if n > tonumber(s[2] or 0) then
  redis.call('HSET', KEYS[1], 'ckpt', n)
  event(ARGV[1], 'checkpointed', '', '')
end
return 1
