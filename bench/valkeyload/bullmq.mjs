// One phase of BullMQ against a server that is running: `bullmq.mjs PORT PHASE COUNT CONCURRENCY`. Prints the CPU
// seconds of this process, spent between the start and the end of the phase.
import { createRequire } from 'node:module';
const require = createRequire(new URL('../../tests/interop/package.json', import.meta.url));
const { Queue, Worker } = require('bullmq');

const [port, phase, count, concurrency] = [+process.argv[2], process.argv[3], +process.argv[4], +process.argv[5]];
const connection = { port, maxRetriesPerRequest: null };
const queue = new Queue('bench', { connection });
await queue.waitUntilReady();
const rows = Array.from({ length: count }, (_, n) => ({ name: 'job', data: { n } }));

async function addBulk() {
  for (let i = 0; i < count; i += 500) await queue.addBulk(rows.slice(i, i + 500));
}

async function addOneByOne() {
  for (const row of rows) await queue.add(row.name, row.data);
}

function work() {
  return new Promise((resolve) => {
    let done = 0;
    const worker = new Worker('bench', async () => null, { connection, concurrency });
    worker.on('completed', () => ++done === count && resolve());
  });
}

const before = process.cpuUsage();
await { bulk: addBulk, single: addOneByOne, work }[phase]();
const spent = process.cpuUsage(before);
console.log((spent.user + spent.system) / 1e6);
process.exit(0);
