-- transfer_open: workers that are ready may enroll for a version that is sent without the disk (the trainer's driver).
-- KEYS: transfer:MODEL, sub:NAME
-- ARGV: prefix, owner, gen, id (VERSION-REV), longest life in ms
-- Returns: 1, or 0 if the subscription is not the caller's
-- Atomic because the record of an earlier version must be deleted in the instant in which this one opens, and a trainer
-- that was replaced must not end its successor's transfer.
local transfer_key, sub_key = KEYS[1], KEYS[2]
local prefix, owner, gen, id, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

freeing(prefix)
if not owns(sub_key, owner, gen) then return 0 end
redis.call('DEL', transfer_key)
redis.call('HSET', transfer_key, 'id', id, 'st', 'open')
redis.call('PEXPIRE', transfer_key, ttl_ms)
count(prefix, 'transfers')
return 1
