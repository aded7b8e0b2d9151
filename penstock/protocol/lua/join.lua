-- join: a trainer takes the ownership of its subscription, or keeps it (heartbeat of its leader rank).
-- KEYS: sub:NAME, owner:NAME, subs
-- ARGV: prefix, owner's token, lease in ms, 1: only if it is the caller's already, what the ranks of its
--       job have in common ('': not known)
-- Returns: {1, gen, cursor, cut, ckpt, floor} | {0, ms until the present owner's lease ends}
-- Atomic because one subscription has one owner: two trainers with one name would each train half of it.
local owner, lease = ARGV[2], ARGV[3]
freeing(ARGV[1])
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= owner then return {0, redis.call('PTTL', KEYS[2])} end
if ARGV[4] == '1' and redis.call('HGET', KEYS[1], 'owner') ~= owner then return {0, -1} end
if holder then redis.call('PEXPIRE', KEYS[2], lease) else redis.call('SET', KEYS[2], owner, 'PX', lease) end
if redis.call('HGET', KEYS[1], 'owner') ~= owner then 
  redis.call('HSET', KEYS[1], 'owner', owner, 'bits', '', 'job', ARGV[5] or '')
  redis.call('HDEL', KEYS[1], 'ended')
end
redis.call('HSET', KEYS[1], 'seen', now_ms())
if redis.call('HDEL', KEYS[1], 'parked') == 1 then
  redis.call('HINCRBY', KEYS[3], 'rev', 1)
  event(ARGV[1], 'subs', '', '')
end
local s = redis.call('HMGET', KEYS[1], 'gen', 'cursor', 'cut', 'ckpt', 'floor')
return {1, tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0), tonumber(s[4] or 0), tonumber(s[5] or 0)}
