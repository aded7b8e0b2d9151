-- transfer_open: workers that are ready may enroll for a version that comes without the disk (the trainer's driver).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), longest life in ms
-- Returns: 1
-- Atomic because what an earlier version left must go in the instant in which this one opens.
local transfer_key = KEYS[1]
local prefix, id, ttl_ms = ARGV[1], ARGV[2], ARGV[3]

freeing(prefix)
redis.call('DEL', transfer_key)
redis.call('HSET', transfer_key, 'id', id, 'st', 'open')
redis.call('PEXPIRE', transfer_key, ttl_ms)
count(prefix, 'transfers')
return 1
