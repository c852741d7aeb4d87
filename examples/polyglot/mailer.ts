// The Bun side of shop.py: a worker for mails that has a picture resized by Python first.
import { Queue, QueueEvents, Worker } from 'bunqueue/client';

const connection = { host: '127.0.0.1', port: Number(process.env.HEADRACE_PORT ?? 6789) };
const images = new Queue('examples-images', { embedded: false, connection });
const events = new QueueEvents('examples-images', { connection });

const worker = new Worker(
  'examples-mails',
  async (job) => {
    const picture = await images.add('resize', { args: ['logo.png'], kwargs: { width: 64 } });
    const resized = await picture.waitUntilFinished(events, 10_000);
    return `mail to ${job.data.to} with ${resized}`;
  },
  { embedded: false, connection },
);

worker.on('completed', async () => {
  await worker.close();
  events.close();
  images.close();
});
