-- Appends tokens to each session that has the expected length. Follows layout.lua and admit.lua.
-- KEYS: session, tokens, logprobs of the first session, then of the second session ...
-- ARGV: ttl_ms; then MessagePack, with an array for each session: epoch, owner, expected length,
--       token bytes, logprobs, whether `more_follow`, and {field, value, field, value ...} to set if
--       the tokens are appended
-- Returns for each session the stored length in tokens, or {'missing', 0}, or {'stale', stored
-- epoch}, or an error. An error of one session does not concern the other sessions.
-- If Redis aborts this script at any call, it has at most raised the epoch of a session (admit.lua),
-- and readers see no change of this session. It may have appended to sessions before this session.
local ttl_ms = ARGV[1]

local function append(keys, given)
  local epoch, owner, expected, tokens, logprobs, more_follow, fields = unpack(given)
  local session, refusal = admit(keys[1], epoch, owner)
  if not session then return refusal end

  local length = length_of(session, keys[2])
  if length == expected and #tokens > 0 then
    local left_ms = redis.call('PTTL', keys[1])
    if left_ms < 1 then left_ms = ttl_ms end
    -- While all tokens are sent again, readers see the old tokens until the last part is stored.
    local is_part = session.rewrite and more_follow
    local prefix = is_part and 'pending_' or ''
    local counted = session
    if session.rewrite then counted = session.pending end
    local ends = {'rewrite', is_part and '1' or '0'}
    for i, new in ipairs({{'tokens', tokens}, {'logprobs', logprobs}}) do
      local name, bytes = new[1], new[2]
      local start, stop
      if counted then
        start, stop = extent(keys[1 + i], counted[name .. '_start'], counted[name .. '_end'])
      else
        start = redis.call('STRLEN', keys[1 + i])  -- The new bytes follow all stored bytes.
        stop = start
      end
      if #bytes > 0 then put(keys[1 + i], stop, bytes, left_ms) end
      for _, value in ipairs({prefix .. name .. '_start', start,
          prefix .. name .. '_end', stop + #bytes}) do
        ends[#ends + 1] = value
      end
    end
    if not is_part then
      for _, value in ipairs(fields) do ends[#ends + 1] = value end
    end
    redis.call('HSET', keys[1], unpack(ends))
    length = length + #tokens / 4
  end

  if session.state == 'running' then prolong(keys, ttl_ms) end
  return length
end

local answers = {}
for i, given in ipairs(cmsgpack.unpack(ARGV[2])) do
  local done, answer = pcall(append, {unpack(KEYS, 3 * i - 2, 3 * i)}, given)
  if not done then answer = {err = type(answer) == 'table' and answer.err or tostring(answer)} end
  answers[i] = answer
end
return answers
