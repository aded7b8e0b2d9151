-- agree: a rank says what it is about to do, and sees what the others of its role said (each rank, before a step).
-- KEYS: sub:NAME, agree:NAME
-- ARGV: prefix, owner, gen, round, role, rank, ranks, what it says, seconds the words are kept
-- Returns: {'owner'}, or {'ok', words of rank 0, ...}; '' where a rank has said nothing in this round
-- Atomic because a rank of an older owner or generation must not be heard. Two rounds are kept: nobody begins round
-- r + 1 before it has heard everybody in round r, so r - 1 is over for all (T14).
freeing(ARGV[1])
if not owns(KEYS[1], ARGV[2], ARGV[3]) then return {'owner'} end
local round, role = ARGV[4], ARGV[5]
local mark = ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. round .. ' '
local function name(rank) return role .. '/' .. rank .. '/' .. (tonumber(round) % 2) end
redis.call('HSET', KEYS[2], name(ARGV[6]), mark .. ARGV[8])
redis.call('EXPIRE', KEYS[2], ARGV[9])
local said = {'ok'}
for rank = 0, tonumber(ARGV[7]) - 1 do
  local word = redis.call('HGET', KEYS[2], name(rank)) or ''
  said[#said + 1] = string.sub(word, 1, #mark) == mark and string.sub(word, #mark + 1) or ''
end
return said
