-- rolled_back: Redis forgot acknowledged writes (failover, power loss); what is known of it is kept (leader).
-- KEYS: counters
-- ARGV: prefix, then per counter: name, by how much it went back (at least)
-- Returns: how often that happened so far
-- Atomic because the report is one.
freeing(ARGV[1])
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], 'rolled_back:' .. ARGV[i], ARGV[i + 1]) end
return redis.call('HINCRBY', KEYS[1], 'rolled_back', 1)
