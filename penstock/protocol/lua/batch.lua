-- A batch: ready groups that are cut for a subscription and committed by all ranks of its trainer, and the columns that
-- the trainer adds to it.
-- Keys: batches:NAME, trained:NAME, agree:NAME, columns:NAME, columns_lost:NAME, column:SUB:N:DIGEST:GEN:NAME

-- Return whether `role` is one of a subscription's roles (a comma-separated list; '' with a single trainer).
local function has_role(roles, role)
  if roles == '' then return role == '' end
  return string.find(',' .. roles .. ',', ',' .. role .. ',', 1, true) ~= nil
end

-- Parse 'ROLE:0110,ROLE:01' into role -> a '1' or '0' for each of its ranks.
local function role_bits(bits)
  local sets = {}
  for role, set in string.gmatch(bits or '', '([^:,]*):([01]+)') do sets[role] = set end
  return sets
end

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
local function cut()
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
end

-- skip: places in the order of admission that are empty now are skipped (leader).
-- KEYS: leader, subs, sub:NAME
-- ARGV: prefix, epoch, token, revision of subs, place to be cut next, places to skip
-- Returns: {'skipped' | 'subs' | 'moved', places skipped so far}, or -1 when the leadership is lost
-- Atomic because the position moves once, and the gate sees the places free in that instant.
local function skip()
  local leader_key, subs_key, sub_key = KEYS[1], KEYS[2], KEYS[3]
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local revision, place, num_places = ARGV[4], tonumber(ARGV[5]), ARGV[6]

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  if (redis.call('HGET', subs_key, 'rev') or '0') ~= revision then return {'subs', 0} end
  local s = redis.call('HMGET', sub_key, 'cum', 'skipped')
  if tonumber(s[1] or 0) + tonumber(s[2] or 0) + 1 ~= place then return {'moved', tonumber(s[2] or 0)} end
  local skipped = redis.call('HINCRBY', sub_key, 'skipped', num_places)
  poke(prefix .. 'gate')
  return {'skipped', skipped}
end

-- conclude: the batch that a subscription asks for will not be cut, since the data has ended (leader).
-- KEYS: leader, source, sub:NAME, delayed, counters, then jobs:LANE of every lane whose jobs it may still use
-- ARGV: prefix, epoch, token, number of the batch, position at which the data ends, completed groups when it was seen
-- Returns: 1 concluded, 0: something has changed meanwhile, -1: leadership lost
-- Atomic because it is true only while everything is admitted and nothing is queued, running or to be retried; no
-- batch is cut after it until the trainer joins or rewinds anew, so that all ranks see the same end.
local function conclude()
  local leader_key, source_key, sub_key, delayed_key, counters_key = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
  local first_lane_key = 6
  local prefix, epoch, token = ARGV[1], ARGV[2], ARGV[3]
  local n, end_position, completed = tonumber(ARGV[4]), ARGV[5], ARGV[6]

  freeing(prefix)
  if not leads(leader_key, epoch, token) then return -1 end
  local source = redis.call('HMGET', source_key, 'train', 'end')
  if source[2] ~= end_position or tonumber(source[1] or 0) < tonumber(end_position) then return 0 end
  local s = redis.call('HMGET', sub_key, 'ask', 'cut')
  if tonumber(s[2] or 0) ~= n - 1 or tonumber(s[1] or 0) < n then return 0 end
  local flying = redis.call('ZCARD', delayed_key)
  for i = first_lane_key, #KEYS do flying = flying + redis.call('XLEN', KEYS[i]) end
  if flying > 0 or (redis.call('HGET', counters_key, 'completed') or '0') ~= completed then return 0 end
  redis.call('HSET', sub_key, 'ended', n)
  return 1
end

-- agree: a rank reports what it is about to do, and reads the reports of the other ranks of its role (before a step).
-- KEYS: sub:NAME, agree:NAME
-- ARGV: prefix, owner, gen, round, role, rank, ranks, its report, seconds the reports are kept
-- Returns: {'owner'}, or {'ok', report of rank 0, ...}; '' for a rank without a report in this round
-- Atomic because the report of a rank with an older owner or generation must not count. Two rounds are kept: no rank
-- begins round r + 1 before it has read all reports of round r, so r - 1 is over for all (T14).
local function agree()
  local sub_key, words_key = KEYS[1], KEYS[2]
  local prefix, owner, gen, round, role = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
  local caller, num_ranks, word, ttl_s = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return {'owner'} end
  local mark = owner .. ' ' .. gen .. ' ' .. round .. ' '
  local function name(rank) return role .. '/' .. rank .. '/' .. (tonumber(round) % 2) end
  redis.call('HSET', words_key, name(caller), mark .. word)
  redis.call('EXPIRE', words_key, ttl_s)
  local said = {'ok'}
  for rank = 0, num_ranks - 1 do
    local heard = redis.call('HGET', words_key, name(rank)) or ''
    said[#said + 1] = string.sub(heard, 1, #mark) == mark and string.sub(heard, #mark + 1) or ''
  end
  return said
end

-- commit_batch: cut -> committed (each rank of each role; the last one's bit moves the cursor).
-- KEYS: sub:NAME, batches:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, ranks, role ('' if the subscription has none)
-- Returns: {'committed' | 'waiting' | 'already' | 'owner' | 'order' | 'diverged' | 'unknown' | 'role', cursor, bits};
--          bits: 'ROLE:0110,ROLE:' of every role, 1 for each rank that has committed the batch; with 'order' those of
--          the batch after the cursor, which has to be committed first
-- Atomic because the cursor moves once per batch, when every rank of every role has committed it (T13, T15).
local function commit_batch()
  local sub_key, batches_key = KEYS[1], KEYS[2]
  local prefix, owner, gen, n = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
  local digest, rank, num_ranks, role = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]

  local TRAINED_MAX = 1024 -- batches whose time is kept for the history

  freeing(prefix)
  if not owns(sub_key, owner, gen) then return {'owner', 0, ''} end
  local s = redis.call('HMGET', sub_key, 'cursor', 'bits', 'cut', 'roles')
  local cursor, roles = tonumber(s[1] or 0), s[4] or ''
  if not has_role(roles, role) then return {'role', cursor, ''} end
  if n > tonumber(s[3] or 0) then return {'unknown', cursor, ''} end
  local found = redis.call('XRANGE', batches_key, n .. '-0', n .. '-0')
  if #found == 1 and field(found[1][2], 'dg') ~= digest then return {'diverged', cursor, ''} end
  if n <= cursor then return {'already', cursor, ''} end
  if #found == 0 then return {'unknown', cursor, ''} end
  if n ~= cursor + 1 then return {'order', cursor, s[2] or ''} end
  local sets = role_bits(s[2])
  local set = sets[role] or ''
  if #set ~= num_ranks then set = string.rep('0', num_ranks) end
  sets[role] = string.sub(set, 1, rank) .. '1' .. string.sub(set, rank + 2)
  local all, entries = true, {}
  for name in string.gmatch(roles .. ',', '([^,]*),') do
    local of = sets[name] or ''
    if of == '' or string.find(of, '0', 1, true) then all = false end
    entries[#entries + 1] = name .. ':' .. of
  end
  local bits = table.concat(entries, ',')
  if not all then
    redis.call('HSET', sub_key, 'bits', bits)
    return {'waiting', cursor, bits}
  end
  redis.call('HSET', sub_key, 'bits', '', 'cursor', n)
  -- a subscription that does not publish consumes its groups now
  if redis.call('HGET', sub_key, 'driving') ~= '1' then
    redis.call('HSET', sub_key, 'p', field(found[1][2], 'cum') or 0)
    poke(prefix .. 'gate')
  end
  if tonumber(redis.call('HGET', sub_key, 'ask') or 0) > n then event(prefix, 'committed', '', '') end
  if keeps_history(prefix) then -- the time, for the groups that are about to be retired
    local trained = prefix .. 'trained:' .. string.sub(sub_key, #(prefix .. 'sub:') + 1)
    redis.call('HSET', trained, n, now_ms())
    redis.call('HDEL', trained, n - TRAINED_MAX)
  end
  count(prefix, 'batches_committed')
  return {'committed', n, bits}
end

-- column: a rank announces that it writes (part of) a column of a batch to a payload server, under the key that
-- it names.
-- KEYS: sub:NAME, batches:NAME, columns:NAME
-- ARGV: prefix, owner, gen, n, manifest's digest, rank, role, most columns of a batch, seconds the list is kept,
--       then SERVER|KEY of each place
-- Returns: 'ok' | 'owner' | 'role' | 'unknown' | 'diverged' | 'committed' | 'full'
-- Atomic because listed columns are freed with the batch, and because nothing may be added to a batch that this rank,
-- or every rank, has committed (T13). The key has digest and gen, so late writes of an older lineage are never read.
local function column()
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
end

-- write_column: write values of a column to a payload server (rank of a trainer).
-- KEYS: column:SUB:N:DIGEST:GEN:NAME
-- ARGV: seconds it lives unless it is freed before, then row index, bytes, ... of each sample
-- Returns: row indices that hold other bytes already; those are left as they are
-- Atomic because a reader must see one value per row for ever: a value is written once, and repeated only unchanged.
local function write_column()
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
end

-- column_lost: a column has no values for samples whose payload its writer could not read (rank that reads it).
-- KEYS: columns_lost:NAME
-- ARGV: prefix, seconds it is remembered, then DIGEST/COLUMN/ROW of each
-- Returns: those that were not reported before
-- Atomic because every rank, micro-batch and delivery may report it, and it counts once.
local function column_lost()
  local lost_key = KEYS[1]
  local prefix, ttl_s = ARGV[1], ARGV[2]
  local first_value = 3

  freeing(prefix)
  local new = 0
  for i = first_value, #ARGV do new = new + redis.call('SADD', lost_key, ARGV[i]) end
  redis.call('EXPIRE', lost_key, ttl_s)
  if new > 0 then count(prefix, 'column_lost', new) end
  return new
end
