-- Prepended to the scripts of an owner's writes (append.lua, finish.lua, release.lua).

-- Whether a write under (epoch, owner) comes from a former owner of the session. Two owners may have
-- been given the same epoch where Redis lost a take-over: then only the stored one may write.
local function is_stale(epoch, owner, stored_epoch, stored_owner)
  return epoch < stored_epoch or (epoch == stored_epoch and owner ~= stored_owner)
end

-- Returns the session's state, whether its tokens are to be rewritten, and where they lie; or nil and
-- what the script returns: {'missing', 0} or {'stale', stored epoch}.
-- An epoch above the stored one means that a take-over was lost with the store's tail. The session
-- runs again under this owner. What is stored may be of an older one, so it counts as no tokens until
-- this owner has sent all of them (rewrite); till then it stays readable. A session that has finished
-- is left as it is where `keeps_end`.
local function admit(key, epoch, owner, keeps_end)
  local stored = redis.call('HMGET', key, 'epoch', 'owner', 'state', 'rewrite', 'tokens_start',
    'tokens_end', 'logprobs_start', 'logprobs_end')
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
  if tonumber(epoch) > stored_epoch and not (keeps_end and session.state == 'finished') then
    redis.call('HSET', key, 'epoch', epoch, 'owner', owner, 'state', 'running',
      'finish_reason', '', 'rewrite', '1')
    session.state, session.rewrite = 'running', true
  end
  return session
end

-- The stored length in tokens of an admitted session.
local function length_of(session)
  if session.rewrite then return 0 end
  local start, stop = extent(KEYS[2], session.tokens_start, session.tokens_end)
  return (stop - start) / 4
end
