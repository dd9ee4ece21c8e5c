-- The functions of the Redis store that claim, complete and cancel requests. Each decides like the method of the same
-- name in consumers/state/sqlite/requests.py, which is easier to read.
function run.claim(lease_ms, keep_ms, cancelled_ms, hash, mark, redelivered, dead_at, nonce)
  local row, attempts, deaths = read(request), 0, 0
  if row and not row.noted and not runs_again(row, dead_at) then
    if other_body(row, hash) then return {'conflict'} end
    if row.ended then
      return {'ended', (row.mark == '' or row.mark == mark) and 1 or 0, ending_for(row, mark)}
    end
    if row.lease > 0 and nonce ~= '' and row.nonce == nonce then
      return {'granted', row.token, row.deaths, redis.call('EXISTS', followed)}
    end
    if is_held(row, mark, redelivered, nonce) then return {'running', now - tonumber(row.claimed)} end
    if row.cancelling then
      end_as_cancelled(cancelled_ms)
      return {'ended', 1, ending()}
    end
    attempts, deaths = row.attempts, row.deaths + (row.lease > 0 and 1 or 0)
  end
  write_new(row, 'hash', hash, 'mark', mark, 'nonce', nonce, 'deaths', deaths, 'lease', now + lease_ms,
    'claimed', now, 'attempts', attempts)
  redis.call('PEXPIRE', request, keep_ms + lease_ms)
  if row and row.ended then restart_entries(keep_ms) end
  return {'granted', next_token(row), deaths, row and redis.call('EXISTS', followed) or 0}
end

-- After `lease_ms` and `keep_ms`, the arguments are the tokens of the claims.
function run.renew(lease_ms, keep_ms)
  local stops = {}
  for i, key in ipairs(KEYS) do
    local row = read(key)
    stops[i] = ''
    if row and row.token ~= tonumber(ARGV[i + 2]) then
      stops[i] = 'fenced'
    elseif row then
      if row.cancelling or (row.ended and row.code == 'cancelled') then stops[i] = 'cancelled' end
      if not row.ended then
        redis.call('HSET', key, 'lease', now + lease_ms)
        redis.call('PEXPIRE', key, keep_ms + lease_ms)
      end
    end
  end
  return stops
end

function run.release(keep_ms, cancelled_ms, token, attempts, due)
  local row = read(request)
  if not row or row.ended then return end
  if row.token ~= tonumber(token) then
    redis.call('HSET', request, 'deaths', math.max(0, row.deaths - 1))
  elseif row.cancelling then
    end_as_cancelled(cancelled_ms)
  else
    redis.call('HSET', request, 'lease', 0, 'attempts', attempts, 'due', due)
    redis.call('PEXPIRE', request, keep_ms)
  end
end

-- `...`, here and in the functions below: the names of the completion's fields, each followed by its value.
function run.complete(keep_ms, token, hash, mark, redelivered, dead_at, nonce, ...)
  local row = read(request)
  token = tonumber(token)
  if row and row.token == token then
    if row.ended then return {'held', ending()} end
    redis.call('HSET', request, 'lease', 0, 'cancelling', '', ...)
  else
    if row and not row.noted and not (not token and runs_again(row, dead_at)) then
      if other_body(row, hash) then return {token and 'fenced' or 'given'} end
      if row.ended then return {'held', ending_for(row, mark)} end
      if token or is_held(row, mark, redelivered, nonce) then return {'fenced'} end
    end
    write_new(row, 'hash', hash, 'mark', mark, 'nonce', nonce, 'claimed', now, ...)
    if row and row.ended then restart_entries(keep_ms) end
  end
  redis.call('PEXPIRE', request, keep_ms)
  return {'given'}
end

function run.defer(due, keep_until)
  local row = read(request)
  if row and not row.noted then return row.ended and 0 or 1 end
  write_new(row, 'noted', '1', 'due', due)
  redis.call('PEXPIRE', request, keep_until - now)
  return 1
end

function run.note(keep_ms, ...)
  local row = read(request)
  if row and (not row.noted or (row.deferred and row.due ~= '')) then return end
  write_new(row, 'noted', '1', ...)
  redis.call('PEXPIRE', request, keep_ms)
end

function run.cancel(cancelled_ms, id, prefix, at_most, ...)
  local row, unseen = read(request), KEYS[4]
  if not row or row.noted then
    write_new(row)
  elseif row.ended then
    return 'ended'
  elseif row.lease > now then
    if not row.cancelling then redis.call('HSET', request, 'cancelling', '1', ...) end
    return 'told'
  end
  end_as_cancelled(cancelled_ms, ...)
  if row and (row.deferred or not row.noted) then return 'recorded' end
  redis.call('ZREMRANGEBYSCORE', unseen, '-inf', now)
  redis.call('ZADD', unseen, now + cancelled_ms, id)
  redis.call('PEXPIRE', unseen, cancelled_ms)
  local came_to = 'unseen'
  for _ = 1, 10 do
    if redis.call('ZCARD', unseen) <= tonumber(at_most) then break end
    local oldest = prefix .. redis.call('ZPOPMIN', unseen)[1]
    local old = read(oldest)
    if old and old.ended and old.code == 'cancelled' and old.hash == '' then redis.call('DEL', oldest) end
    came_to = 'displaced'
  end
  return came_to
end

function run.find()
  local row = read(request)
  if not row then return nil end
  if row.ended then return {'ended', row.attempts, ending()} end
  if row.lease > now then return {'running', row.attempts, ''} end
  return {'waiting', row.attempts, row.due}
end
