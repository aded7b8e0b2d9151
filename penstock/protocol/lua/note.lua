-- note: a small record of who is there or waits, shown to people ('' takes it away).
-- KEYS: hash of such records
-- ARGV: prefix, field, record
-- Returns: 1
-- One script so that it is allowed when Redis is full, which is when waits have to be told.
freeing(ARGV[1])
if ARGV[3] == '' then redis.call('HDEL', KEYS[1], ARGV[2]) else redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
return 1
