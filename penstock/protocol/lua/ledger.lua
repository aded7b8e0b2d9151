-- The ledger of tokens (I10). Every token that was reported to a fenced verb is in exactly one account of the hash
-- `tokens`, field LANE:ACCOUNT, or is held by a group that is neither dead nor retiring.
-- Keys: tokens, fields tk, t:K and l:SUB of group:JOB
--
-- A worker reports for a sample `LIVE,BEHIND_STOP,REWOUND,LOST_TURN,UNHEARD`: generated tokens that it has, including
-- those of an earlier lease; tokens discarded under this lease, by reason; and requests without an answer. For a sample
-- that is not committed the group keeps in `t:K` the last report, followed by how much of it the prefix holds; `tk` has
-- the generated tokens of committed ones, K:TOKENS. A report replaces the one before, so a repeated verb changes
-- nothing.

local THROWN = {'behind_stop', 'rewound', 'lost_turn'}
local REWOUND, LOST_TURN, UNHEARD, KEPT = #THROWN, #THROWN + 1, #THROWN + 2, #THROWN + 3
local FIELDS_AT_ONCE = 1000

-- While many groups are booked at once: the sums that are not written yet, by field; else nil.
local unwritten = nil

local function book(prefix, lane, account, by)
  local name = lane .. ':' .. account
  if by == 0 then return end
  if unwritten then
    unwritten[name] = (unwritten[name] or 0) + by
  else
    redis.call('HINCRBY', prefix .. 'tokens', name, by)
  end
end

-- Run `act`, and write all that it books at once.
local function book_together(prefix, act)
  unwritten = {}
  act()
  local booked = unwritten
  unwritten = nil
  for name, by in pairs(booked) do redis.call('HINCRBY', prefix .. 'tokens', name, by) end
end

local function numbers_in(word)
  local found = {}
  for number in string.gmatch(word or '', '%d+') do found[#found + 1] = tonumber(number) end
  for i = #found + 1, KEPT do found[i] = 0 end
  return found
end

-- Parse `K:TOKENS,K:TOKENS` into tokens by k.
local function tokens_in(word)
  local found = {}
  for k, tokens in string.gmatch(word or '', '(%d+):(%d+)') do found[k] = tonumber(tokens) end
  return found
end

-- Return a group's field `l:SUB` with one more batch: `N/K:TOKENS,...` of each batch N that it entered, separated by
-- ';'. A batch in which no sample bears more than in earlier ones adds nothing: those are durable first.
local function with_batch(known, n, bearing)
  local word = n .. '/' .. bearing
  if not known then return word end
  local most = {}
  for k, tokens in string.gmatch(known, '(%d+):(%d+)') do most[k] = math.max(most[k] or 0, tonumber(tokens)) end
  for k, tokens in pairs(tokens_in(bearing)) do
    if tokens > (most[k] or 0) then return known .. ';' .. word end
  end
  return known
end

local function total(tokens)
  local sum = 0
  for _, number in pairs(tokens) do sum = sum + number end
  return sum
end

-- Count requests whose tokens will never be reported; the number of tokens is unknown, so there is no account.
local function unheard(prefix, lane, requests)
  if requests ~= 0 then redis.call('HINCRBY', prefix .. 'counters', 'unheard:' .. lane, requests) end
end

-- Count all requests that may be running in a group that is taken from its worker without a report.
local function unhear(prefix, key)
  local g = redis.call('HMGET', key, 'ln', 'n', 'c')
  if g[1] ~= 'score' then unheard(prefix, g[1], (tonumber(g[2]) or 0) - (tonumber(g[3]) or 0)) end
end

-- Compare a new report `word` of a sample with the earlier one, `before`. Books tokens discarded since then; returns
-- the newly reported tokens, for the caller to book, and the numbers of the report.
local function compare_reports(prefix, lane, before, word)
  local plain = not before and string.match(word, '^(%d+),0,0,0,0$')
  if plain then return tonumber(plain), {tonumber(plain), 0, 0, 0, 0, 0} end -- the usual case
  local was, now = numbers_in(before), numbers_in(word)
  local new = now[1] - was[1]
  for i, account in ipairs(THROWN) do
    local more = now[i + 1] - was[i + 1]
    book(prefix, lane, account, more)
    new = new + more
  end
  unheard(prefix, lane, now[UNHEARD] - was[UNHEARD])
  now[KEPT] = was[KEPT]
  return new, now
end

-- Return whether the prefix was discarded since the report `was`: its sample started over, or was cut at a stop in it.
local function is_prefix_gone(was, now)
  local started_over = now[REWOUND] > was[REWOUND] or now[LOST_TURN] > was[LOST_TURN]
  return now[KEPT] > 0 and (started_over or now[1] < now[KEPT])
end

-- Record the report of sample k by the holder of a group's lease. `in_prefix`: the prefix holds exactly this from now
-- on. Else a discarded prefix is deleted: its tokens are booked, and the next lease would discard it again.
local function tell(prefix, key, lane, k, word, in_prefix)
  local g = redis.call('HMGET', key, 's:' .. k, 't:' .. k)
  if g[1] or word == '' then return end -- a committed sample was reported by its commit
  local new, now = compare_reports(prefix, lane, g[2], word)
  book(prefix, lane, 'heard', new)
  if in_prefix then
    now[KEPT] = now[1]
  elseif is_prefix_gone(numbers_in(g[2]), now) then
    redis.call('DEL', prefix .. 'partial:' .. string.sub(key, #prefix + #'group:' + 1) .. '/' .. k)
    now[KEPT] = 0
  end
  redis.call('HSET', key, 't:' .. k, table.concat(now, ','), 'told', 1)
end

-- Record reports of many samples, from `first` of the arguments on: k, word, k, word, ...
local function tell_all(prefix, key, lane, arguments, first)
  for i = first, #arguments, 2 do tell(prefix, key, lane, arguments[i], arguments[i + 1], false) end
end

-- Return field and numbers of each sample of a group that has a report and is not committed.
local function told_of(key)
  local g, found = redis.call('HMGET', key, 'told', 'n'), {}
  if not g[1] then return found end
  for first = 0, (tonumber(g[2]) or 0) - 1, FIELDS_AT_ONCE do
    local names = {}
    for k = first, math.min(first + FIELDS_AT_ONCE, tonumber(g[2])) - 1 do names[#names + 1] = 't:' .. k end
    for i, word in ipairs(redis.call('HMGET', key, unpack(names))) do
      if word then found[#found + 1] = {names[i], numbers_in(word)} end
    end
  end
  return found
end

-- Return the generated tokens that a group holds: of committed samples, and of those that are running or have a prefix.
local function held_by(key)
  local sum = total(tokens_in(redis.call('HGET', key, 'tk')))
  for _, one in ipairs(told_of(key)) do sum = sum + one[2][1] end
  return sum
end

-- End a group's lease: tokens that no prefix holds are lost, for this reason.
local function settle(prefix, key, lane, account)
  local lost = 0
  for _, one in ipairs(told_of(key)) do
    local name, numbers = one[1], one[2]
    local kept = numbers[KEPT]
    lost = lost + numbers[1] - kept
    if kept > 0 then
      redis.call('HSET', key, name, kept .. string.rep(',0', KEPT - 2) .. ',' .. kept)
    else
      redis.call('HDEL', key, name)
    end
  end
  book(prefix, lane, account, lost)
end

-- Book the tokens of samples of a group that will never be committed.
local function forgo(prefix, key, lane, account)
  local lost = 0
  for _, one in ipairs(told_of(key)) do
    lost = lost + one[2][1]
    redis.call('HDEL', key, one[1])
  end
  redis.call('HDEL', key, 'told')
  book(prefix, lane, account, lost)
end

-- Book all tokens that a group holds: `parts`, {account, tokens} each, and the rest to `account`. Those of a dead job
-- are booked already. `held`: the tokens that it holds, if known; else nil.
local function spend(prefix, key, account, parts, held)
  local g = redis.call('HMGET', key, 'st', 'ln')
  if g[1] == 'dead' or g[1] == 'retiring' then return end
  local rest = held or held_by(key)
  for _, part in ipairs(parts or {}) do
    local tokens = math.min(part[2], rest)
    book(prefix, g[2], part[1], tokens)
    rest = rest - tokens
  end
  book(prefix, g[2], account, rest)
end

-- Return names and checkpoints of dropped subscriptions: what was durable then stays trained.
local function left_subs(subs_key)
  local found, flat = {}, redis.call('HGETALL', subs_key)
  for i = 1, #flat, 2 do
    local name = string.match(flat[i], '^was:([^:]+)$')
    if name then found[#found + 1] = {name = name, ckpt = tonumber(flat[i + 1]) or 0} end
  end
  return found
end

-- Return, by k, the most tokens that bore loss in a durable batch of these subscriptions; nil if no batch is durable.
local function borne_by(key, users)
  local names, bore = {}, nil
  for _, user in ipairs(users) do names[#names + 1] = 'l:' .. user.name end
  for i, field_of_user in ipairs(redis.call('HMGET', key, unpack(names))) do
    for n, word in string.gmatch(field_of_user or '', '(%d+)/([^;]*)') do
      if tonumber(n) <= users[i].ckpt then
        bore = bore or {}
        for k, tokens in pairs(tokens_in(word)) do bore[k] = math.max(bore[k] or 0, tokens) end
      end
    end
  end
  return bore
end

-- Return {trained, payload lost} of the tokens of a group that was in a durable batch. `bore`: see borne_by.
local function bearing_of(key, bore, tk, some_lost)
  local trained, lost = 0, 0
  for k, tokens in pairs(tokens_in(tk)) do
    if some_lost and redis.call('HEXISTS', key, 'x:' .. k) == 1 then
      lost = lost + tokens
    else
      trained = trained + math.min(tokens, bore[k] or 0)
    end
  end
  return {{'trained', trained}, {'payload_lost', lost}}
end

-- Return `SUB:N,...`: the last durable batch of each of these subscriptions.
local function checkpoints_of(users)
  local words = {}
  for i, user in ipairs(users) do words[i] = user.name .. ':' .. user.ckpt end
  return table.concat(words, ',')
end

-- Return the fate of a completed group: the account of its tokens, the parts that go to other accounts, and
-- checkpoints_of the subscriptions in whose batches it was.
-- `readers`: name, ckpt, batch (the last that held it, 0: none) and uses (or the code of a disposal) each; `left`: see
-- left_subs; `reasons`: code of a disposal -> its word; `tk`, `lost`: fields of the group.
-- One fate by precedence: trained (bore loss in a durable batch), masked, evicted, filtered, dropped.
local function fate_of(key, lane, tk, lost, readers, left, reasons, otherwise)
  local users, dropped, filtered = {}, nil, nil
  local function see(name, batch, ckpt)
    if batch > 0 then users[#users + 1] = {name = name, ckpt = ckpt} end
  end
  for _, sub in ipairs(readers) do
    see(sub.name, sub.batch, sub.ckpt)
    local word = sub.uses < 0 and (reasons[tostring(sub.uses)] or 'unknown')
    if word == 'filtered' then filtered = filtered or redis.call('HGET', key, 'fr:' .. sub.name) or 'unknown' end
    dropped = dropped or word
  end
  for _, sub in ipairs(left) do see(sub.name, tonumber(redis.call('HGET', key, 'b:' .. sub.name) or 0), sub.ckpt) end
  local bore = #users > 0 and borne_by(key, users)
  if bore then
    if lane == 'eval' then return 'evaluated', {}, checkpoints_of(users) end
    return 'masked', bearing_of(key, bore, tk, lost), checkpoints_of(users)
  end
  if #users > 0 then return 'evicted', {}, checkpoints_of(users) end
  if filtered then return 'filtered:' .. filtered, {} end
  if dropped == 'payload_lost' then return 'payload_lost', {} end
  return dropped and 'dropped:' .. dropped or otherwise, {}
end

-- Parse `CODE=WORD,CODE=WORD` into the words of disposals by code.
local function reasons_in(word)
  local found = {}
  for code, reason in string.gmatch(word, '(-%d+)=([%w_]+)') do found[code] = reason end
  return found
end

-- recount_tokens: invariant I10 in one instant (audit).
-- KEYS: tokens, delayed, ready, then jobs:LANE of every lane
-- ARGV: prefix
-- Returns: {fields and values of the ledger, flat; home lanes and the tokens that their live groups hold, flat}
-- Atomic because tokens move meanwhile. Takes some microseconds for each live group.
local function recount_tokens()
  local tokens_key, delayed_key, ready_key = KEYS[1], KEYS[2], KEYS[3]
  local first_lane_key = 4
  local prefix = ARGV[1]

  local held = {}
  local function add(job)
    local key = group_key_of(prefix, job)
    local lane = redis.call('HGET', key, 'ln')
    if lane then held[lane] = (held[lane] or 0) + held_by(key) end
  end
  local function add_lane(key)
    local from = '-'
    while true do
      local entries = redis.call('XRANGE', key, from, '+', 'COUNT', 256)
      for _, entry in ipairs(entries) do
        local job = field(entry[2], 'id')
        if job then add(job) end
      end
      if #entries < 256 then return end
      from = '(' .. entries[#entries][1]
    end
  end

  for i = first_lane_key, #KEYS do add_lane(KEYS[i]) end
  for _, key in ipairs({delayed_key, ready_key}) do
    for _, job in ipairs(redis.call('ZRANGE', key, 0, -1)) do add(job) end
  end
  local flat = {}
  for lane, tokens in pairs(held) do
    flat[#flat + 1] = lane
    flat[#flat + 1] = tostring(tokens)
  end
  return {redis.call('HGETALL', tokens_key), flat}
end
