-- write_column: write values of a column to a payload server (rank of a trainer).
-- KEYS: column:SUB:N:DIGEST:GEN:NAME
-- ARGV: seconds it lives unless it is freed before, then row index, bytes, ... of each sample
-- Returns: row indices that hold other bytes already; those are left as they are
-- Atomic because a reader must see one value per row for ever: a value is written once, and repeated only unchanged.
local column_key = KEYS[1]
local ttl_s = ARGV[1]
local first_row = 2

redis.call('HDEL', column_key, 'nothing') -- allowed when Redis is full: the batch has to be trained to free anything
local other = {}
for i = first_row, #ARGV, 2 do
  local row, value = ARGV[i], ARGV[i + 1]
  if redis.call('HSETNX', column_key, row, value) == 0
    and redis.call('HGET', column_key, row) ~= value then
    other[#other + 1] = row
  end
end
redis.call('EXPIRE', column_key, ttl_s)
return other
