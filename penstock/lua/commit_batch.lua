-- commit_batch: cut -> committed (each rank; the last rank's bit moves the cursor).
-- KEYS: sub:NAME, batches:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, ranks
-- Returns: {'committed' | 'waiting' | 'already' | 'owner' | 'order' | 'diverged' | 'unknown', cursor}
-- Atomic because the cursor moves once per batch, when every rank has it behind it.
local prefix, n = ARGV[1], tonumber(ARGV[4])
freeing(prefix)
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return {'owner', 0} end
local s = redis.call('HMGET', KEYS[1], 'cursor', 'bits', 'cut')
local cursor = tonumber(s[1] or 0)
if n > tonumber(s[3] or 0) then return {'unknown', cursor} end
local found = redis.call('XRANGE', KEYS[2], n .. '-0', n .. '-0')
if #found == 1 and field(found[1][2], 'dg') ~= ARGV[5] then return {'diverged', cursor} end
if n <= cursor then return {'already', cursor} end
if #found == 0 then return {'unknown', cursor} end
if n ~= cursor + 1 then return {'order', cursor} end
local rank, ranks, bits = tonumber(ARGV[6]), tonumber(ARGV[7]), s[2] or ''
if #bits ~= ranks then bits = string.rep('0', ranks) end
bits = string.sub(bits, 1, rank) .. '1' .. string.sub(bits, rank + 2)
if string.find(bits, '0', 1, true) then
  redis.call('HSET', KEYS[1], 'bits', bits)
  return {'waiting', cursor}
end
redis.call('HSET', KEYS[1], 'bits', '', 'cursor', n)
count(prefix, 'batches_committed')
return {'committed', n}
