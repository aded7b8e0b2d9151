-- column: a rank announces that it writes (part of) a column of a batch to a payload server, under the key that it
-- names.
-- KEYS: sub:NAME, batches:NAME, columns:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, role, most columns of a batch, seconds the list is kept,
--       then SERVER|KEY of each place
-- Returns: 'ok' | 'owner' | 'role' | 'unknown' | 'diverged' | 'committed' | 'full'
-- Atomic because listed columns are freed with the batch, and because nothing may be added to a batch that this rank,
-- or every rank, has committed (T13). The key has digest and gen, so late writes of an older lineage are never read.
local sub_key, batches_key, columns_key = KEYS[1], KEYS[2], KEYS[3]
local prefix, owner, gen, n, digest = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local rank, role, most, ttl_s = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8]), ARGV[9]
local first_place = 10

freeing(prefix) -- a full Redis is emptied by trainers that continue
if not owns(sub_key, owner, gen) then return 'owner' end
local s = redis.call('HMGET', sub_key, 'cursor', 'bits', 'roles')
if not has_role(s[3] or '', role) then return 'role' end
local found = redis.call('XRANGE', batches_key, n .. '-0', n .. '-0')
if #found == 0 then return 'unknown' end
if field(found[1][2], 'dg') ~= digest then return 'diverged' end
-- the bits are of the batch after the cursor; a role may be further ahead
local next = tonumber(s[1] or 0) + 1
if n < next or (n == next and string.sub(role_bits(s[2])[role] or '', rank + 1, rank + 1) == '1') then
  return 'committed'
end
for i = first_place, #ARGV do redis.call('ZADD', columns_key, n, ARGV[i]) end
redis.call('EXPIRE', columns_key, ttl_s)
if redis.call('ZCOUNT', columns_key, n, n) > most then
  for i = first_place, #ARGV do redis.call('ZREM', columns_key, ARGV[i]) end
  return 'full'
end
return 'ok'
