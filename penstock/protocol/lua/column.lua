-- column: a rank is about to write (part of) a column of a batch to a payload server, under the key that it names.
-- KEYS: sub:NAME, batches:NAME, columns:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, role, most columns of a batch, seconds the list is kept,
--       then SERVER|KEY of each place
-- Returns: 'ok' | 'owner' | 'role' | 'unknown' | 'diverged' | 'committed' | 'full'
-- Atomic because what is listed is freed with the batch, and because nothing may be added to a batch that this rank,
-- or everybody, has committed (T13). The key carries digest and gen: what an older lineage writes late, nobody reads.
freeing(ARGV[1]) -- a trainer that goes on is what empties a full Redis
local n, rank, role, most = tonumber(ARGV[4]), tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return 'owner' end
local s = redis.call('HMGET', KEYS[1], 'cursor', 'bits', 'roles')
if not has_role(s[3] or '', role) then return 'role' end
local found = redis.call('XRANGE', KEYS[2], n .. '-0', n .. '-0')
if #found == 0 then return 'unknown' end
if field(found[1][2], 'dg') ~= ARGV[5] then return 'diverged' end
-- the bits are of the batch after the cursor; a role may be further ahead
local next = tonumber(s[1] or 0) + 1
if n < next or (n == next and string.sub(role_bits(s[2])[role] or '', rank + 1, rank + 1) == '1') then
  return 'committed'
end
for i = 10, #ARGV do redis.call('ZADD', KEYS[3], n, ARGV[i]) end
redis.call('EXPIRE', KEYS[3], ARGV[9])
if redis.call('ZCOUNT', KEYS[3], n, n) > most then
  for i = 10, #ARGV do redis.call('ZREM', KEYS[3], ARGV[i]) end
  return 'full'
end
return 'ok'
