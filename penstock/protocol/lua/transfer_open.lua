-- transfer_open: workers that are ready may enroll for a version that comes without the disk (the trainer's driver).
-- KEYS: transfer:MODEL
-- ARGV: prefix, id (VERSION-REV), longest life in ms
-- Returns: 1
-- Atomic because what an earlier version left must go in the instant in which this one opens.
freeing(ARGV[1])
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'id', ARGV[2], 'st', 'open')
redis.call('PEXPIRE', KEYS[1], ARGV[3])
count(ARGV[1], 'transfers')
return 1
