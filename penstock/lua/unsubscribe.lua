-- unsubscribe: drop a subscription; its groups no longer wait for it (operator, or a trainer that is finished).
-- KEYS: subs, sub:NAME, batches:NAME, owner:NAME
-- ARGV: prefix, name
-- Returns: 1, or 0 when there was none
-- Atomic because a seal must see either all of it or none. The name cannot come back: groups remember its uses.
freeing(ARGV[1])
if redis.call('HDEL', KEYS[1], 'sub:' .. ARGV[2]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'was:' .. ARGV[2], 1)
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
redis.call('HINCRBY', KEYS[1], 'rev', 1)
event(ARGV[1], 'subs', '', '')
return 1
