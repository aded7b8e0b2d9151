-- cut: create a batch (leader).
-- KEYS: leader, subs, sub:NAME, batches:NAME, clock
-- ARGV: prefix, epoch, token, sub, revision of subs, n, manifest, digest, places it consumes at the gate,
--       version field of clock ('' for none), version it was planned at, oldest version allowed (-1: any),
--       groups that a version consumes from now on ('': as before), record for the history, tokens of
--       each group that bear loss (K:TOKENS with commas; groups with ';'), then jobs
-- Returns: {'cut'} | {'already'} | {'subs'} | {'order', cut} | {'clock', version} | {'group', job, why}, or -1 when the
--          leadership is lost
-- Atomic because every group must be ready, kept, unused up to its limit and inside the bound in the instant in
-- which the batch is created; nothing is written unless all are (I5, I6).
local leader_key, subs_key, sub_key, batches_key, clock_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
local sub, revision, n = ARGV[4], ARGV[5], tonumber(ARGV[6])
local manifest, digest, num_places = ARGV[7], ARGV[8], tonumber(ARGV[9])
local clock_field, planned_version, oldest = ARGV[10], ARGV[11], tonumber(ARGV[12])
local groups_per_version, of_use, bearing = ARGV[13], ARGV[14], ARGV[15]
local first_job = 16

freeing(prefix) -- a cut leads to retirement, which is what empties a full Redis
if not leads(leader_key, epoch, token) then return -1 end
if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs'} end
local s = redis.call('HMGET', sub_key, 'cut', 'reuse', 'cum', 'restored')
local cut, reuse = tonumber(s[1] or 0), tonumber(s[2] or 1)
if n == cut then
  local found = redis.call('XRANGE', batches_key, n .. '-0', n .. '-0')
  if #found == 1 and field(found[1][2], 'dg') == digest then return {'already'} end
end
if n ~= cut + 1 then return {'order', cut} end
if clock_field ~= '' then
  local version = redis.call('HGET', clock_key, clock_field) or '0'
  -- nor between a rewind and its publication: the clock still has an abandoned version
  if version ~= planned_version or s[4] == '1' then return {'clock', version} end
end
local used = 'u:' .. account_of(sub_key, sub)
for i = first_job, #ARGV do
  local job = ARGV[i]
  local g = redis.call('HMGET', group_key_of(prefix, job), 'st', 'kept', 'n', used, 'o')
  if g[1] ~= 'ready' then return {'group', job, 'not ready'} end
  if g[2] ~= g[3] then return {'group', job, 'not kept'} end
  local uses = tonumber(g[4] or 0)
  if uses < 0 or uses >= reuse then return {'group', job, 'used'} end
  if oldest >= 0 and tonumber(g[5]) >= 0 and tonumber(g[5]) < oldest then return {'group', job, 'stale'} end
end
local cum = tonumber(s[3] or 0) + num_places
local jobs = table.concat(ARGV, ',', first_job)
redis.call('XADD', batches_key, n .. '-0', 'm', manifest, 'dg', digest, 'cum', cum, 'j', jobs)
redis.call('HSET', sub_key, 'cut', n, 'cum', cum)
-- this batch contains the groups granted for it
redis.call('HDEL', sub_key, 'owed')
if groups_per_version ~= '' then redis.call('HSET', sub_key, 'gb', groups_per_version) end
-- in a run that keeps a history: all uses of a group, since its manifests may go before it does
local use = keeps_history(prefix) and n .. ':' .. now_ms() .. ':' .. of_use
local bore = string.gmatch(bearing .. ';', '([^;]*);')
for i = first_job, #ARGV do
  local key = group_key_of(prefix, ARGV[i])
  local uses = redis.call('HINCRBY', key, used, 1)
  local known = uses > 1 and redis.call('HGET', key, 'l:' .. sub)
  redis.call('HSET', key, 'b:' .. sub, n, 'l:' .. sub, with_batch(known, n, bore() or ''))
  if use then
    local before = redis.call('HGET', key, 'h:' .. sub)
    redis.call('HSET', key, 'h:' .. sub, before and before .. ';' .. use or use)
  end
end
count(prefix, 'cut')
return {'cut'}
