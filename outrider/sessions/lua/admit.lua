-- This file begins the scripts of an owner's writes: append.lua, finish.lua and release.lua.

-- Whether a write under (epoch, owner) comes from a former owner of the session. Two owners may
-- have the same epoch if Redis lost a take-over. In this case, only the stored owner may write.
local function is_stale(epoch, owner, stored_epoch, stored_owner)
  return epoch < stored_epoch or (epoch == stored_epoch and owner ~= stored_owner)
end

-- Returns the session: its state, whether its tokens will be rewritten, and the byte ranges of
-- tokens and log-probabilities. If the write is not admitted, returns nil and the script's result,
-- which is {'missing', 0} or {'stale', stored epoch}.
-- An epoch above the stored one means that Redis lost a take-over. The session runs again under
-- this owner. The stored tokens may be a former owner's, so they no longer count (`rewrite`). They
-- stay readable until this owner has sent all tokens again. The new tokens are stored after the old
-- tokens, in the byte ranges of the pending fields. With `keeps_end`, a finished session
-- stays unchanged.
local function admit(key, epoch, owner, keeps_end)
  local stored = redis.call('HMGET', key, 'epoch', 'owner', 'state', 'rewrite', 'tokens_start',
    'tokens_end', 'logprobs_start', 'logprobs_end', 'pending_tokens_start', 'pending_tokens_end',
    'pending_logprobs_start', 'pending_logprobs_end')
  if not stored[1] then return nil, {'missing', 0} end
  local stored_epoch = tonumber(stored[1])
  if is_stale(tonumber(epoch), owner, stored_epoch, stored[2]) then
    return nil, {'stale', stored_epoch}
  end
  local session = {
    state = stored[3], rewrite = stored[4] == '1',
    tokens_start = stored[5], tokens_end = stored[6],
    logprobs_start = stored[7], logprobs_end = stored[8],
  }
  if session.rewrite and stored[9] and stored[9] ~= '' then
    session.pending = {
      tokens_start = stored[9], tokens_end = stored[10],
      logprobs_start = stored[11], logprobs_end = stored[12],
    }
  end
  if tonumber(epoch) > stored_epoch and not (keeps_end and session.state == 'finished') then
    redis.call('HSET', key, 'epoch', epoch, 'owner', owner, 'state', 'running',
      'finish_reason', '', 'rewrite', '1', 'pending_tokens_start', '')
    session.state, session.rewrite, session.pending = 'running', true, nil
  end
  return session
end

-- The stored length in tokens of an admitted session. `key` is the key of its tokens.
local function length_of(session, key)
  local counted = session
  if session.rewrite then counted = session.pending end
  if not counted then return 0 end
  local start, stop = extent(key, counted.tokens_start, counted.tokens_end)
  return (stop - start) / 4
end
