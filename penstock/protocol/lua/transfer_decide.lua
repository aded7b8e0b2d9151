-- transfer_decide: say who receives a version, and how; the others load it from the disk (the trainer's driver).
-- KEYS: transfer:MODEL, transfers:MODEL
-- ARGV: prefix, id (VERSION-REV), decision record
-- Returns: 1, or 0 when it is of another version by now
-- Atomic because the decision closes the enrollment that it is about.
freeing(ARGV[1])
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'st', 'closed')
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 64, '*', 'id', ARGV[2], 'd', ARGV[3])
return 1
