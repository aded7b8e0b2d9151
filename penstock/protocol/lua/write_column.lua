-- write_column: values of a column, on a payload server (rank of a trainer).
-- KEYS: column:SUB:N:DIGEST:GEN:NAME
-- ARGV: seconds it lives unless it is freed before, then row index, bytes, ... of each sample
-- Returns: row indices that hold other bytes already; those are left as they are
-- Atomic because a reader must see one value per row for ever: a column is written once, and again only the same.
redis.call('HDEL', KEYS[1], 'nothing') -- allowed when Redis is full: the batch has to be trained to free anything
local other = {}
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 0
    and redis.call('HGET', KEYS[1], ARGV[i]) ~= ARGV[i + 1] then
    other[#other + 1] = ARGV[i]
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return other
