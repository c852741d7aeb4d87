-- One call: what every verb reads and leaves behind. Functions run one at a time, so these locals belong to the call
-- that is under way; `verb` sets them anew. A verb checks everything before its first write: nothing can be undone.

local BAND = 4398046511104 -- 2^42: one priority of the `scheduled` set
local GROUP = 'workers'
local CONSUMER = 'headrace' -- for all of us: who works on a job is told by its lease, and consumers are never forgotten
local MAX_TIMELINE = 20
local EVENTS_CAP = 1000

local call -- redis.call, which is there only while a function runs: `verb` sets it

local NOW, NOW_TEXT, DUE, BAD_NEWS
local NEWS, JOBS, TOUCHED, READY = {}, {}, {}, {}
local QUEUES = {} -- whose meta was read

local function str(number)
  return string.format('%.0f', number)
end

-- What a server gives as a row of names and values.
local function to_map(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

-- A map as JSON. Fields of a job are text, so that any client can read its hash. Empty lists are left out: an empty
-- table does not tell whether it is a list.
local function to_text(map)
  local kept = {}
  for name, value in pairs(map) do
    if type(value) ~= 'table' or next(value) ~= nil then kept[name] = value end
  end
  return cjson.encode(kept)
end

local function refuse(kind, text)
  error({ kind = kind, text = text }, 0)
end

-- Have the queue looked at again at `ms`.
local function due_at(ms)
  if ms and (not DUE or ms < DUE) then DUE = ms end
end

-- -- queues -------------------------------------------------------------------------------------------------------------

local queue_at, queue_of_key, forget_queues
do
  -- Queues outlive the call, with the names of keys that nearly every call needs: putting these together each time costs
  -- more than some commands do. Within a call a queue is one object: too many are forgotten between calls only.
  local KNOWN, BY_META, MAX_KNOWN, known = {}, {}, 1000, 0

  function forget_queues()
    if known >= MAX_KNOWN then KNOWN, BY_META, known = {}, {}, 0 end
  end

  local function new_queue(prefix)
    local names = { job = prefix .. ':job:' }
    for _, key in ipairs({ 'meta', 'stream', 'events', 'completed', 'scheduled', 'priority', 'lifo', 'ratelimited' }) do
      names[key] = prefix .. ':' .. key
    end
    for _, key in ipairs({ 'active', 'ready', 'delayed' }) do
      names[key] = prefix .. ':hr:' .. key
    end
    return { p = prefix, k = names, root = string.match(prefix, '^(.*):{'), name = string.match(prefix, '{(.*)}$') }
  end

  -- The queue whose keys begin with `prefix`, e.g. glide:{mail}.
  function queue_at(prefix)
    local queue = KNOWN[prefix]
    if not queue then
      queue = new_queue(prefix)
      KNOWN[prefix], BY_META[queue.k.meta], known = queue, queue, known + 1
    end
    return queue
  end

  function queue_of_key(key)
    local queue = BY_META[key]
    if queue then return queue end
    if string.sub(key, -6) ~= '}:meta' then refuse('internal', 'the key must be <prefix>:{<queue>}:meta, not ' .. key) end
    return queue_at(string.sub(key, 1, -6))
  end
end

local function meta(queue)
  if not queue.meta then
    queue.meta, QUEUES[#QUEUES + 1] = to_map(call('HGETALL', queue.k.meta)), queue
  end
  return queue.meta
end

local function config(queue, field)
  local text = meta(queue)[field]
  return text and cjson.decode(text) or nil
end

-- -- news ---------------------------------------------------------------------------------------------------------------

-- Have other brokers look at the queue. Those with parked pulls on it have said so in its meta: `parked`.
local function wake_others(queue, parked)
  if parked and tonumber(parked) > NOW then call('PUBLISH', queue.root .. ':hr:wake', queue.name) end
end

-- Waiting jobs came, or a slot is free again: tell the broker that made the call, and others.
local function wake(queue)
  if READY[queue.name] then return end
  READY[queue.name] = true
  wake_others(queue, meta(queue).hrParked)
end

-- For the log of the broker that made the call.
local function tell_queue(word, queue, extra)
  local event = extra or {}
  event.event = word
  event.queue = queue.name
  event.ts = NOW
  event.seq, event.epoch = 0, 0 -- the broker numbers them
  NEWS[#NEWS + 1] = event
  return event
end

local publish_end, tell
do
  local function is_end(event)
    return event.event == 'completed' or event.event == 'removed' or event.event == 'expired' or event.terminal
  end

  -- The id by which everybody outside the queue knows the job: those of Node producers are numbers of one queue.
  local function shown_id(job)
    return job.h.hv and job.id or job.queue.name .. ':' .. job.id
  end

  -- Somebody may wait for the end of the job at another broker.
  function publish_end(event, job)
    local awaited = meta(job.queue).hrAwaited
    if not awaited or tonumber(awaited) <= NOW then return end
    local ended = { queue = event.queue, job = shown_id(job), state = event.event, error = event.error }
    if event.event == 'completed' and not job.h.hn then ended.value, ended.raw = job.h.returnvalue, job.h.hr end
    call('PUBLISH', job.queue.root .. ':hr:ended', cjson.encode(ended))
  end

  function tell(word, job, extra)
    local event = tell_queue(word, job.queue, extra)
    event.job = shown_id(job)
    event.name = job.h.name ~= '' and job.h.name or nil
    if is_end(event) then publish_end(event, job) end
    return event
  end
end

-- For everybody who reads the queue's event stream: Node's QueueEvents above all.
local function announce(queue, kind, job_id, ...)
  call('XADD', queue.k.events, 'MAXLEN', '~', meta(queue).hrEvents or EVENTS_CAP, '*', 'event', kind, 'jobId', job_id, ...)
end

-- A result that JSON does not hold exactly goes with its bytes.
local function announce_completed(queue, job_id, value, raw)
  if raw and raw ~= '' then
    announce(queue, 'completed', job_id, 'returnvalue', value, 'raw', raw)
  else
    announce(queue, 'completed', job_id, 'returnvalue', value)
  end
end

-- -- registering --------------------------------------------------------------------------------------------------------

local flush -- see jobs.lua
local tell_flow, tell_flow_of_removal -- see flows.lua
local plan_scheduler -- see settlement.lua
local expire, is_expired -- see delivery.lua

local NEEDS_MEMORY = {}
local verb, bare_verb
do
  local function news_of_call()
    if #NEWS == 0 and next(READY) == nil and not DUE then return '' end
    local ready = {}
    for name in pairs(READY) do ready[#ready + 1] = name end
    return cmsgpack.pack({ NEWS, ready, DUE or false })
  end

  -- Tables that the last call left empty serve again: what is not allocated need not be collected.
  local function begin_call()
    if next(NEWS) then NEWS = {} end
    if next(JOBS) then JOBS = {} end
    if next(TOUCHED) then TOUCHED = {} end
    if next(READY) then READY = {} end
    for i, queue in ipairs(QUEUES) do
      queue.meta, QUEUES[i] = nil, nil
    end
    DUE, BAD_NEWS = nil, nil
    forget_queues()
  end

  local function run_whole(run, keys, args)
    local found = run(queue_of_key(keys[1]), args, keys) or {}
    flush()
    return found
  end

  local function refusal(name, problem)
    if type(problem) == 'table' and problem.kind then return { '!', problem.kind, problem.text } end
    return redis.error_reply('ERR headrace_' .. name .. ': ' .. (type(problem) == 'table' and (problem.err or '?') or tostring(problem)))
  end

  -- A verb gets (queue, args, keys) and returns a list; the news of the call is appended to it. The second argument
  -- names what `args` has after `now`, for readers and for the table in docs/valkey.md: X* is any number of X, and names in
  -- capitals are records of arguments.py. A server that is out of memory refuses only verbs marked NEEDS_MEMORY: they bring
  -- in something new. All others go on, because what ends is what makes room.
  local GOES_ON = { 'allow-oom' }
  function verb(name, _, run, flags)
    redis.register_function({
      function_name = 'headrace' .. GENERATION .. '_' .. name,
      flags = flags or GOES_ON,
      callback = function(keys, args)
        begin_call()
        NOW, NOW_TEXT, call = tonumber(args[1]), args[1], redis.call
        local done, result = pcall(run_whole, run, keys, args)
        if not done then return refusal(name, result) end
        result[#result + 1] = news_of_call()
        return result
      end,
    })
  end

  -- A verb that has no news, loads no job and reads no meta but by itself: nothing has to be prepared or cleaned up.
  local NO_NEWS = { '' }
  function bare_verb(name, _, run, flags)
    redis.register_function({
      function_name = 'headrace' .. GENERATION .. '_' .. name,
      flags = flags or GOES_ON,
      callback = function(keys, args)
        forget_queues()
        NOW, NOW_TEXT, call = tonumber(args[1]), args[1], redis.call
        local done, problem = pcall(run, queue_of_key(keys[1]), args)
        return done and NO_NEWS or refusal(name, problem)
      end,
    })
  end
end
