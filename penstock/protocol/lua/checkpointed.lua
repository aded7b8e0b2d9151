-- checkpointed: committed -> durable up to n; the file of the caller's role is safe (leader rank of each role).
-- KEYS: sub:NAME, samples
-- ARGV: prefix, owner, gen, n, role ('' where the subscription has none)
-- Returns: 1, 0 when the subscription is not the caller's, -1 when n is not committed
-- Atomic because groups may be retired from this instant on: durable is what every role has in a file (T13).
freeing(ARGV[1])
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return 0 end
local s = redis.call('HMGET', KEYS[1], 'cursor', 'ckpt', 'roles')
local n, roles = tonumber(ARGV[4]), s[3] or ''
if n > tonumber(s[1] or 0) then return -1 end
if roles ~= '' then
  redis.call('HSET', KEYS[1], 'ckpt:' .. ARGV[5], n)
  for role in string.gmatch(roles, '[^,]+') do
    n = math.min(n, tonumber(redis.call('HGET', KEYS[1], 'ckpt:' .. role) or 0))
  end
end
if n > tonumber(s[2] or 0) then
  redis.call('HSET', KEYS[1], 'ckpt', n)
  event(ARGV[1], 'checkpointed', '', '')
end
return 1
