-- column_lost: a column says nothing of samples whose payload its writer had lost (rank that reads it).
-- KEYS: columns_lost:NAME, counters
-- ARGV: prefix, seconds it is remembered, then DIGEST/COLUMN/ROW of each
-- Returns: those that nobody had told before
-- Atomic because every rank, micro-batch and delivery may find it, and it counts once.
freeing(ARGV[1])
local new = 0
for i = 3, #ARGV do new = new + redis.call('SADD', KEYS[1], ARGV[i]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
if new > 0 then count(ARGV[1], 'column_lost', new) end
return new
