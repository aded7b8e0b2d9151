-- rolled_back: Redis forgot acknowledged writes (failover, power loss); what is known of it is kept (leader).
-- KEYS: counters
-- ARGV: per counter: name, by how much it went back (at least)
-- Returns: how often that happened so far
-- Atomic because the report is one.
for i = 1, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], 'rolled_back:' .. ARGV[i], ARGV[i + 1]) end
return redis.call('HINCRBY', KEYS[1], 'rolled_back', 1)
