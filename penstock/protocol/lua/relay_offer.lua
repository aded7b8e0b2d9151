-- relay_offer: an object's files, their ranges and their addresses (the trainer's driver, periodically).
-- KEYS: relay:OBJECT, relay_names, sub:NAME
-- ARGV: prefix, owner, gen, offer record, how long in ms it holds unless it is renewed, name of the object
-- Returns: 'offered' | 'owner'
-- Atomic because an offer without an expiry would outlive the trainer that serves it, a name without an offer would be
-- requested in vain, and a trainer that was replaced must not change its successor's offers; a script so that it is
-- allowed when Redis is full.
local relay_key, names_key, sub_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, owner, gen, record, ttl_ms, name = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

freeing(prefix)
if not owns(sub_key, owner, gen) then return 'owner' end
local now = now_ms()
redis.call('SET', relay_key, record, 'PX', ttl_ms)
redis.call('ZREMRANGEBYSCORE', names_key, '-inf', now)
redis.call('ZADD', names_key, now + ttl_ms, name)
if redis.call('PTTL', names_key) < ttl_ms then redis.call('PEXPIRE', names_key, ttl_ms) end
return 'offered'
