-- subscribe: make or change a subscription's definition.
-- KEYS: subs, sub:NAME
-- ARGV: prefix, name, then field, value, ... of the definition
-- Returns: revision of subs, or -1 when a subscription of this name was dropped before
-- Atomic because a cut or a seal that was planned on the old definition must see another revision.
freeing(ARGV[1])
-- groups remember the uses of the one that was dropped
if redis.call('HEXISTS', KEYS[1], 'was:' .. ARGV[2]) == 1 then return -1 end
local changed = redis.call('HGET', KEYS[1], 'sub:' .. ARGV[2]) ~= 'live'
-- what was gone before it came is not of its stock at the gate
if changed then
  redis.call('HSETNX', KEYS[2], 'start', redis.call('HGET', ARGV[1] .. 'counters', 'gone:train') or 0)
end
for i = 3, #ARGV, 2 do
  if redis.call('HGET', KEYS[2], ARGV[i]) ~= ARGV[i + 1] then changed = true end
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
if not changed then return tonumber(redis.call('HGET', KEYS[1], 'rev')) end
redis.call('HSETNX', KEYS[2], 'gen', 0)
redis.call('HSET', KEYS[1], 'sub:' .. ARGV[2], 'live')
event(ARGV[1], 'subs', '', '')
poke(ARGV[1] .. 'gate')
return redis.call('HINCRBY', KEYS[1], 'rev', 1)
