// One phase of BullMQ against a server that is running: `bullmq.mjs PORT QUEUE PHASE COUNT CONCURRENCY`. Prints what the phase
// took as JSON: CPU seconds of this process and of the server. See ours.py, which does the same.
import { createRequire } from 'node:module';
const require = createRequire(new URL('../../tests/interop/package.json', import.meta.url));
const { Queue, Worker } = require('bullmq');

const WARM_UP = 200;
const BULK = 500;
const JOB_MS = 3;
const [name, phase] = process.argv.slice(3, 5);
const [port, count, concurrency] = [2, 5, 6].map((i) => +process.argv[i]);
const connection = { port, maxRetriesPerRequest: null };

async function addBulk(queue, count) {
  const rows = Array.from({ length: count }, (_, n) => ({ name: 'job', data: { n } }));
  for (let i = 0; i < count; i += BULK) await queue.addBulk(rows.slice(i, i + BULK));
}

async function addOneByOne(queue, count) {
  for (let n = 0; n < count; n++) await queue.add('job', { n });
}

async function work(queue, count, handle = async () => null) {
  let left = count;
  let worker;
  await new Promise((resolve) => {
    worker = new Worker(queue.name, handle, { connection, concurrency });
    worker.on('completed', () => --left === 0 && resolve());
  });
  await worker.close();
}

const workSlowly = (queue, count) => work(queue, count, () => new Promise((done) => setTimeout(done, JOB_MS, null)));

const run = { bulk: addBulk, single: addOneByOne, work, slow: workSlowly }[phase];
const warm = new Queue(`warm-${phase}`, { connection });
const queue = new Queue(name, { connection });
const client = await queue.client;

async function serverCpu() {
  const used = await client.info('cpu');
  return ['user', 'sys'].reduce((sum, kind) => sum + +used.match(new RegExp(`used_cpu_${kind}:([0-9.]+)`))[1], 0);
}

if (phase === 'work' || phase === 'slow') await addBulk(warm, WARM_UP);
if (phase === 'slow') await addBulk(queue, count);
await run(warm, WARM_UP);
const before = [process.cpuUsage(), await serverCpu()];
await run(queue, count);
const spent = process.cpuUsage(before[0]);
const server = (await serverCpu()) - before[1];
console.log(JSON.stringify({ client: (spent.user + spent.system) / 1e6, server }));
process.exit(0);
