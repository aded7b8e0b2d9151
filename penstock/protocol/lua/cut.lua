-- cut: a batch comes to be (leader).
-- KEYS: leader, subs, sub:NAME, batches:NAME, clock
-- ARGV: prefix, epoch, token, sub, revision of subs, n, manifest, digest, places it consumes at the gate,
--       version field of clock ('' for none), version it was planned at, oldest version allowed (-1: any),
--       groups that a version consumes from now on ('': as before), then jobs
-- Returns: {'cut'} | {'already'} | {'subs'} | {'order', cut} | {'clock', version} | {'group', job, why}, or -1 when the
--          leadership is lost
-- Atomic because every group must be ready, kept, unused up to its limit and inside the bound in the instant in
-- which the batch comes to be; nothing is written unless all are (I5, I6).
local prefix, sub, n = ARGV[1], ARGV[4], tonumber(ARGV[6])
freeing(prefix) -- a cut leads to retirement, which is what empties a full Redis
if not leads(KEYS[1], ARGV[2], ARGV[3]) then return -1 end
if (redis.call('HGET', KEYS[2], 'rev') or '0') ~= ARGV[5] then return {'subs'} end
local s = redis.call('HMGET', KEYS[3], 'cut', 'reuse', 'cum', 'restored')
local cut, reuse = tonumber(s[1] or 0), tonumber(s[2] or 1)
if n == cut then
  local found = redis.call('XRANGE', KEYS[4], n .. '-0', n .. '-0')
  if #found == 1 and field(found[1][2], 'dg') == ARGV[8] then return {'already'} end
end
if n ~= cut + 1 then return {'order', cut} end
if ARGV[10] ~= '' then
  local version = redis.call('HGET', KEYS[5], ARGV[10]) or '0'
  -- nor between a rewind and its publication: the clock still shows a version that was abandoned
  if version ~= ARGV[11] or s[4] == '1' then return {'clock', version} end
end
local floor, used = tonumber(ARGV[12]), 'u:' .. account_of(KEYS[3], sub)
for i = 14, #ARGV do
  local g = redis.call('HMGET', group_key(prefix, ARGV[i]), 'st', 'kept', 'n', used, 'o')
  if g[1] ~= 'ready' then return {'group', ARGV[i], 'not ready'} end
  if g[2] ~= g[3] then return {'group', ARGV[i], 'not kept'} end
  local uses = tonumber(g[4] or 0)
  if uses < 0 or uses >= reuse then return {'group', ARGV[i], 'used'} end
  if floor >= 0 and tonumber(g[5]) >= 0 and tonumber(g[5]) < floor then return {'group', ARGV[i], 'stale'} end
end
local cum = tonumber(s[3] or 0) + tonumber(ARGV[9])
local jobs = table.concat(ARGV, ',', 14)
redis.call('XADD', KEYS[4], n .. '-0', 'm', ARGV[7], 'dg', ARGV[8], 'cum', cum, 'j', jobs)
redis.call('HSET', KEYS[3], 'cut', n, 'cum', cum)
-- what was owed to this batch is in it
redis.call('HDEL', KEYS[3], 'owed')
if ARGV[13] ~= '' then redis.call('HSET', KEYS[3], 'gb', ARGV[13]) end
for i = 14, #ARGV do
  local key = group_key(prefix, ARGV[i])
  redis.call('HINCRBY', key, used, 1)
  redis.call('HSET', key, 'b:' .. sub, n)
end
count(prefix, 'cut')
return {'cut'}
