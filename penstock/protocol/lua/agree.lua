-- agree: a rank says what it is about to do, and sees what the others of its role said (each rank, before a step).
-- KEYS: sub:NAME, agree:NAME
-- ARGV: prefix, owner, gen, round, role, rank, ranks, what it says, seconds the words are kept
-- Returns: {'owner'}, or {'ok', words of rank 0, ...}; '' where a rank has said nothing in this round
-- Atomic because a rank of an older owner or generation must not be heard. Two rounds are kept: nobody begins round
-- r + 1 before it has heard everybody in round r, so r - 1 is over for all (T14).
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
