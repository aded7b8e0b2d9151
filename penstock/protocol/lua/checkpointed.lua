-- checkpointed: committed -> durable up to n; the caller's role has a checkpoint file (leader rank of each role).
-- KEYS: sub:NAME
-- ARGV: prefix, owner, gen, n, role ('' if the subscription has none)
-- Returns: 1, 0 when the subscription is not the caller's, -1 when n is not committed
-- Atomic because groups may be retired from this instant on: a batch is durable when every role has it in a file (T13).
local sub_key = KEYS[1]
local prefix, owner, gen, n, role = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

freeing(prefix)
if not owns(sub_key, owner, gen) then return 0 end
local s = redis.call('HMGET', sub_key, 'cursor', 'ckpt', 'roles')
local roles = s[3] or ''
if n > tonumber(s[1] or 0) then return -1 end
if roles ~= '' then
  redis.call('HSET', sub_key, 'ckpt:' .. role, n)
  for name in string.gmatch(roles, '[^,]+') do
    n = math.min(n, tonumber(redis.call('HGET', sub_key, 'ckpt:' .. name) or 0))
  end
end
if n > tonumber(s[2] or 0) then
  redis.call('HSET', sub_key, 'ckpt', n)
  event(prefix, 'checkpointed', '', '')
end
return 1
