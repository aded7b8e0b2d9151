-- rolled_back: Redis forgot acknowledged writes (failover, power loss); what is known of it is kept (leader).
-- KEYS: counters
-- ARGV: prefix, then per counter: name, by how much it went back (at least)
-- Returns: how often that happened so far
-- Atomic because the report is one.
local counters_key = KEYS[1]
local prefix = ARGV[1]
local first_counter = 2

freeing(prefix)
for i = first_counter, #ARGV, 2 do redis.call('HINCRBY', counters_key, 'rolled_back:' .. ARGV[i], ARGV[i + 1]) end
return redis.call('HINCRBY', counters_key, 'rolled_back', 1)
