-- unsubscribe: drop a subscription; its groups no longer wait for it (operator, or a trainer that is finished).
-- KEYS: subs, sub:NAME, batches:NAME, owner:NAME, orders:NAME
-- ARGV: prefix, name
-- Returns: 1, or 0 when there was none
-- Atomic because a seal must see either all of it or none. The name cannot be used again: groups remember its uses.
-- Uncommitted batches of a pool's member go to the other members; committed ones stay consumed.
local subs_key, sub_key, batches_key, owner_key, orders_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local prefix, name = ARGV[1], ARGV[2]

freeing(prefix)
if redis.call('HDEL', subs_key, 'sub:' .. name) == 0 then return 0 end
redis.call('HSET', subs_key, 'was:' .. name, number_of(redis.call('HGET', sub_key, 'ckpt')) or 0)
local share = redis.call('HGET', sub_key, 'share') or ''
if share ~= '' then
  give_back(prefix, name, sub_key, batches_key)
  local s = redis.call('HMGET', sub_key, 'cum', 'disposed')
  redis.call('HINCRBY', subs_key, 'gone:' .. share, (number_of(s[1]) or 0) + (number_of(s[2]) or 0))
  local left = false
  for _, f in ipairs(redis.call('HKEYS', subs_key)) do
    local other = string.match(f, '^sub:(.*)$')
    if other and redis.call('HGET', prefix .. 'sub:' .. other, 'share') == share then left = true end
  end
  if not left then redis.call('HSET', subs_key, 'was:share:' .. share, 1) end
end
redis.call('DEL', sub_key, batches_key, owner_key, orders_key, prefix .. 'trained:' .. name)
redis.call('HINCRBY', subs_key, 'rev', 1)
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return 1
