-- unsubscribe: drop a subscription; its groups no longer wait for it (operator, or a trainer that is finished).
-- KEYS: subs, sub:NAME, batches:NAME, owner:NAME
-- ARGV: prefix, name
-- Returns: 1, or 0 when there was none
-- Atomic because a seal must see either all of it or none. The name cannot come back: groups remember its uses.
-- What a member of a pool had in hand goes to the other members; what it had committed stays consumed.
local prefix, name = ARGV[1], ARGV[2]
freeing(prefix)
if redis.call('HDEL', KEYS[1], 'sub:' .. name) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'was:' .. name, 1)
local share = redis.call('HGET', KEYS[2], 'share') or ''
if share ~= '' then
  give_back(prefix, name, KEYS[2], KEYS[3])
  local s = redis.call('HMGET', KEYS[2], 'cum', 'disposed')
  redis.call('HINCRBY', KEYS[1], 'gone:' .. share, tonumber(s[1] or 0) + tonumber(s[2] or 0))
  local left = false
  for _, f in ipairs(redis.call('HKEYS', KEYS[1])) do
    local other = string.match(f, '^sub:(.*)$')
    if other and redis.call('HGET', prefix .. 'sub:' .. other, 'share') == share then left = true end
  end
  if not left then redis.call('HSET', KEYS[1], 'was:share:' .. share, 1) end
end
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('HINCRBY', KEYS[1], 'rev', 1)
event(prefix, 'subs', '', '')
poke(prefix .. 'gate')
return 1
