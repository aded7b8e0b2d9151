-- relay_offer: a version's files, their ranges and where they are served (the trainer's driver, again and again).
-- KEYS: relay:OBJECT
-- ARGV: prefix, offer record, how long in ms it holds unless it is said again
-- Returns: 1
-- Atomic because an offer without an end would outlive the trainer that serves it; one script so that it is allowed
-- when Redis is full.
local relay_key = KEYS[1]
local prefix, record, ttl_ms = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
redis.call('SET', relay_key, record, 'PX', ttl_ms)
return 1
