-- join: a trainer takes the ownership of its subscription, or keeps it (heartbeat of its leader rank).
-- KEYS: sub:NAME, owner:NAME, subs
-- ARGV: prefix, owner's token, lease in ms, 1: only if it is the caller's already, an id that the ranks of its
--       job have in common ('': not known)
-- Returns: {1, gen, cursor, cut, ckpt, floor} | {0, ms until the present owner's lease ends} | {-1}: it was dropped
-- Atomic because one subscription has one owner: two trainers with one name would each train half of it.
local sub_key, owner_key, subs_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, owner, lease_ms, only_renew, job = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

freeing(prefix)
local name = string.sub(sub_key, #prefix + #'sub:' + 1)
-- its keys are deleted, and new ones would never be freed
if redis.call('HEXISTS', subs_key, 'was:' .. name) == 1 then return {-1} end
local holder = redis.call('GET', owner_key)
if holder and holder ~= owner then
  cap_lease(owner_key, lease_ms)
  return {0, redis.call('PTTL', owner_key)}
end
if only_renew == '1' and redis.call('HGET', sub_key, 'owner') ~= owner then return {0, -1} end
if holder then redis.call('PEXPIRE', owner_key, lease_ms) else redis.call('SET', owner_key, owner, 'PX', lease_ms) end
if redis.call('HGET', sub_key, 'owner') ~= owner then
  redis.call('HSET', sub_key, 'owner', owner, 'bits', '', 'job', job)
  redis.call('HDEL', sub_key, 'ended')
end
redis.call('HSET', sub_key, 'seen', now_ms())
if redis.call('HDEL', sub_key, 'parked') == 1 then
  redis.call('HINCRBY', subs_key, 'rev', 1)
  event(prefix, 'subs', '', '')
end
local s = redis.call('HMGET', sub_key, 'gen', 'cursor', 'cut', 'ckpt', 'floor')
return {1, tonumber(s[1] or 0), tonumber(s[2] or 0), tonumber(s[3] or 0), tonumber(s[4] or 0), tonumber(s[5] or 0)}
