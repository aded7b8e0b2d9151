-- column_lost: a column has no values for samples whose payload its writer could not read (rank that reads it).
-- KEYS: columns_lost:NAME
-- ARGV: prefix, seconds it is remembered, then DIGEST/COLUMN/ROW of each
-- Returns: those that were not reported before
-- Atomic because every rank, micro-batch and delivery may report it, and it counts once.
local lost_key = KEYS[1]
local prefix, ttl_s = ARGV[1], ARGV[2]
local first_value = 3

freeing(prefix)
local new = 0
for i = first_value, #ARGV do new = new + redis.call('SADD', lost_key, ARGV[i]) end
redis.call('EXPIRE', lost_key, ttl_s)
if new > 0 then count(prefix, 'column_lost', new) end
return new
