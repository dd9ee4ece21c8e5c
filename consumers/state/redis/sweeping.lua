-- The functions of the Redis store that see who keeps how much, and remove what a tenant has beyond its share, like
-- consumers/state/sqlite/tables.py. (Keys expire by themselves.)
local FIELDS = {'status', 'cancelling', 'lease', 'hash', 'noted', 'headers'}
local UNSEEN_BYTES = 130  -- of the member of a tenant's `unseen`
local function kind_of(key)
  local status, cancelling, lease, hash, noted, headers = unpack(redis.call('HMGET', key, unpack(FIELDS)))
  if not lease or tonumber(lease) > now then return 'kept' end
  local pipeline = key:match('^([^#]*)#')  -- of its steps and items, whose ids begin with that of its request
  if pipeline then
    local state = redis.call('HMGET', pipeline, 'status', 'cancelling')
    if not state[1] or state[1] == '' or state[2] == '1' then return 'flow' end
  end
  if status == '' or cancelling == '1' then return 'live' end
  if hash == '' and noted ~= '1' then return 'cancelled' end
  if status == 'error' and (noted == '1' or headers:find('"x-lane-attempt": 0', 1, true)) then return 'free' end
  return 'paid'
end
local function size_of(...)
  local size = 0
  for _, key in ipairs({...}) do size = size + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) or 0) end
  return size
end

-- Looks at `count` keys, and returns the sums of their sizes by tenant and kind. If shares are given ("tenant kind"),
-- it returns the rows of these, each with its share and what is left of its time.
function run.owned(cursor, begin, count)
  local found = redis.call('SCAN', cursor, 'MATCH', begin .. '*', 'COUNT', count)
  local rows, sums, is_wanted = {found[1]}, {}, {}
  for i = 4, #ARGV do is_wanted[ARGV[i]] = true end
  for _, key in ipairs(found[2]) do
    local name, whose, id = key:sub(#begin + 1):match('^(%a+):([^:]*):?(.*)$')
    local is_request = name == 'request'
    if is_request or name == 'debounce' or name == 'batched' or name == 'files' then
      local of = is_request and kind_of(key) or 'kept'
      local share = whose .. ' ' .. of
      if #ARGV < 4 or is_wanted[share] then
        local after = whose .. ':' .. id
        local size = is_request and size_of(key, begin .. 'followed:' .. after, begin .. 'entries:' .. after)
          or size_of(key)
        if of == 'cancelled' then size = size + UNSEEN_BYTES end
        if is_wanted[share] then
          rows[#rows + 1] = {share, id, size, redis.call('PTTL', key)}
        else
          sums[share] = (sums[share] or 0) + size
        end
      end
    end
  end
  for share, size in pairs(sums) do rows[#rows + 1] = {share, size} end
  return rows
end

-- The keys that fit a pattern, of the next ones that are looked at.
function run.named(cursor, pattern, count)
  local found = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', count)
  return {found[1], unpack(found[2])}
end

-- Removes requests that are still of their kind. For each there are three keys, that of the tenant's unseen
-- cancellations, and two arguments: the kind and the id.
function run.remove()
  local removed = 0
  for i = 1, #KEYS, 4 do
    if redis.call('EXISTS', KEYS[i]) == 1 and kind_of(KEYS[i]) == ARGV[i / 2 + 0.5] then
      redis.call('DEL', KEYS[i], KEYS[i + 1], KEYS[i + 2])
      redis.call('ZREM', KEYS[i + 3], ARGV[i / 2 + 1.5])
      removed = removed + 1
    end
  end
  return removed
end
